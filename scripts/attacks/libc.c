/* The n-th call of the C library below a folder fails, or is the process's last. LD_PRELOAD; Linux.
 *
 *   CALIB8_FAULT="N ACT ERRNO LASTING FOLDER"   N: from 1; ACT: of the enum; LASTING: all later calls fail too
 *   CALIB8_CALLS=FILE                           gets the number of calls at the end
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FAIL, HALF, KILL_BEFORE, KILL_AFTER };
static int at, act, number, lasting, count;
static char folder[PATH_MAX];

__attribute__((constructor)) static void begin(void)
{
    const char *plan = getenv("CALIB8_FAULT");
    if (!plan || sscanf(plan, "%d %d %d %d %4095[^\n]", &at, &act, &number, &lasting, folder) != 5)
        folder[0] = 0;
}

__attribute__((destructor)) static void end(void)
{
    const char *path = getenv("CALIB8_CALLS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%d", count);
        fclose(file);
    }
}

static int below(const char *path)
{
    return folder[0] && path && !strncmp(path, folder, strlen(folder));
}

static int open_below(int handle)
{
    char link[64], path[PATH_MAX];
    if (!folder[0] || handle < 3)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    return below(path);
}

static int due(int ours)
{
    if (!ours)
        return 0;
    int now = __sync_add_and_fetch(&count, 1);
    int hit = now == at || (lasting && act == FAIL && now > at);
    if (hit && act == KILL_BEFORE)
        kill(getpid(), SIGKILL);
    return hit;
}

#define NEXT(result, name, types) \
    static result(*real) types;   \
    if (!real)                    \
    real = (result(*) types)dlsym(RTLD_NEXT, name)

#define CALL(result, name, types, values, ours)     \
    result name types                               \
    {                                               \
        NEXT(result, #name, types);                 \
        int hit = due(ours);                        \
        if (hit && act == FAIL) {                   \
            errno = number;                         \
            return -1;                              \
        }                                           \
        result made = real values;                  \
        if (hit && act == KILL_AFTER)               \
            kill(getpid(), SIGKILL);                \
        return made;                                \
    }

CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), below(path))
CALL(int, rmdir, (const char *path), (path), below(path))
CALL(int, unlink, (const char *path), (path), below(path))
CALL(int, unlinkat, (int where, const char *path, int how), (where, path, how),
     below(path) || open_below(where))
CALL(int, rename, (const char *path, const char *to), (path, to), below(path) || below(to))
CALL(int, chmod, (const char *path, mode_t mode), (path, mode), below(path))
CALL(int, fchmod, (int handle, mode_t mode), (handle, mode), open_below(handle))
CALL(int, fsync, (int handle), (handle), open_below(handle))
CALL(int, ftruncate, (int handle, off_t size), (handle, size), open_below(handle))
CALL(int, ftruncate64, (int handle, off64_t size), (handle, size), open_below(handle))

#define OPEN(name)                                                            \
    int name(const char *path, int how, ...)                                  \
    {                                                                         \
        NEXT(int, #name, (const char *, int, ...));                           \
        va_list rest;                                                         \
        va_start(rest, how);                                                  \
        int mode = how & O_CREAT ? va_arg(rest, int) : 0;                     \
        va_end(rest);                                                         \
        int writes = how & (O_CREAT | O_WRONLY | O_RDWR | O_DIRECTORY);       \
        int hit = due((writes || number == EMFILE) && below(path));           \
        if (hit && act == FAIL) {                                             \
            errno = number;                                                   \
            return -1;                                                        \
        }                                                                     \
        int made = real(path, how, mode);                                     \
        if (hit && act == KILL_AFTER)                                         \
            kill(getpid(), SIGKILL);                                          \
        return made;                                                          \
    }

OPEN(open)
OPEN(open64)

ssize_t write(int handle, const void *data, size_t size)
{
    NEXT(ssize_t, "write", (int, const void *, size_t));
    int hit = due(open_below(handle));
    if (hit && act == FAIL) {
        errno = number;
        return -1;
    }
    ssize_t made = real(handle, data, hit && act == HALF && size > 1 ? size / 2 : size);
    if (hit && act == KILL_AFTER)
        kill(getpid(), SIGKILL);
    return made;
}

int close(int handle) /* which is closed also where it says that it failed */
{
    NEXT(int, "close", (int));
    int hit = due(number != EMFILE && open_below(handle));
    int made = real(handle);
    if (hit && act == KILL_AFTER)
        kill(getpid(), SIGKILL);
    if (hit && act == FAIL) {
        errno = number;
        return -1;
    }
    return made;
}
