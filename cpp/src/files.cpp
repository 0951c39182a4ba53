#include "calib8/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8::files {
namespace {

std::string error_text(int code) { return std::generic_category().message(code); }

// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int handle) : handle_(handle) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (handle_ >= 0) ::close(handle_);
  }
  int get() const { return handle_; }

 private:
  int handle_;
};

// A file that is removed again unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  void release() { path_.clear(); }

 private:
  std::string path_;
};

bool write_all(int handle, std::string_view data) {
  while (!data.empty()) {
    const ssize_t written = ::write(handle, data.data(), data.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    data.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

mode_t current_umask() {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return mask;
}

[[noreturn]] void refuse_to_read(const std::filesystem::path& path, const std::string& reason) {
  throw FeedError(text::printable(path.string()) + " cannot be read: " + reason);
}

// Whether a rename to `path` would replace a pipe or a device. /dev/stdout may lead to a plain file, which
// must not be replaced either.
bool is_device(const std::filesystem::path& path, const std::filesystem::path& folder) {
  std::error_code error;
  return std::filesystem::is_other(path, error) ||
         std::filesystem::canonical(folder, error) == "/dev";
}

// Looked at before and after it is opened: to open a pipe is to wait for it, a device has no end.
void require_regular(const std::filesystem::path& path, int error, const struct ::stat& state) {
  if (error != 0) refuse_to_read(path, error_text(errno));
  if (!S_ISREG(state.st_mode)) refuse_to_read(path, "it is no regular file");
}

[[noreturn]] void refuse_to_write(const std::filesystem::path& path, int code) {
  throw ExportError(path.string() + " must be writable, got: " + error_text(code) +
                    "; give another path");
}

}  // namespace

std::string read(const std::filesystem::path& path, std::uintmax_t max_bytes) {
  struct ::stat state {};
  require_regular(path, ::stat(path.c_str(), &state), state);
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) refuse_to_read(path, error_text(errno));
  require_regular(path, ::fstat(file.get(), &state), state);
  std::string data;
  if (static_cast<std::uintmax_t>(state.st_size) <= max_bytes) {
    data.reserve(static_cast<std::size_t>(state.st_size));
  }
  std::vector<char> buffer(std::size_t{1} << 16U);
  for (;;) {
    if (std::max<std::uintmax_t>(data.size(), static_cast<std::uintmax_t>(state.st_size)) >
        max_bytes) {
      refuse_to_read(path, "it is of over " + std::to_string(max_bytes >> 20U) +
                               " MB, too large for its kind");
    }
    const ssize_t read_bytes = ::read(file.get(), buffer.data(), buffer.size());
    if (read_bytes == 0) return data;
    if (read_bytes > 0) {
      data.append(buffer.data(), static_cast<std::size_t>(read_bytes));
    } else if (errno != EINTR) {
      refuse_to_read(path, error_text(errno));
    }
  }
}

void write(const std::filesystem::path& path, std::string_view data) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (is_device(path, folder)) {
    throw ExportError(path.string() +
                      " must be a file to write to, got a device; give another path");
  }
  std::string name = (folder / (".calib8-XXXXXX-" + path.filename().string())).string();
  const auto suffix = static_cast<int>(path.filename().string().size() + 1);
  const Descriptor file(::mkstemps(name.data(), suffix));
  if (file.get() < 0) refuse_to_write(path, errno);
  TemporaryFile temporary(name);
  const bool is_written = write_all(file.get(), data) && ::fsync(file.get()) == 0 &&
                          ::fchmod(file.get(), 0666U & ~current_umask()) == 0;
  if (!is_written || ::rename(name.c_str(), path.c_str()) != 0) refuse_to_write(path, errno);
  temporary.release();
}

}  // namespace calib8::files
