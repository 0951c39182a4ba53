#include "calib8/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8::files {
namespace {

std::string reason(int code) { return std::generic_category().message(code); }

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
class Leftover {
 public:
  explicit Leftover(std::string path) : path_(std::move(path)) {}
  Leftover(const Leftover&) = delete;
  Leftover& operator=(const Leftover&) = delete;
  ~Leftover() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  void keep() { path_.clear(); }

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

[[noreturn]] void refuse(const std::filesystem::path& path, int code) {
  throw ExportError(path.string() + " must be writable, got: " + reason(code) +
                    "; give another --out");
}

}  // namespace

std::string read(const std::filesystem::path& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    throw FeedError(text::shown(path.string()) + " cannot be read: " + reason(errno));
  }
  std::string data;
  std::vector<char> buffer(std::size_t{1} << 16U);
  for (;;) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got == 0) return data;
    if (got > 0) {
      data.append(buffer.data(), static_cast<std::size_t>(got));
    } else if (errno != EINTR) {
      throw FeedError(text::shown(path.string()) + " cannot be read: " + reason(errno));
    }
  }
}

void write(const std::filesystem::path& path, std::string_view data) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  std::string name = (folder / (".calib8-XXXXXX-" + path.filename().string())).string();
  const auto suffix = static_cast<int>(path.filename().string().size() + 1);
  const Descriptor file(::mkstemps(name.data(), suffix));
  if (file.get() < 0) refuse(path, errno);
  Leftover leftover(name);
  const bool written = write_all(file.get(), data) && ::fsync(file.get()) == 0 &&
                       ::fchmod(file.get(), 0666U & ~current_umask()) == 0;
  if (!written || ::rename(name.c_str(), path.c_str()) != 0) refuse(path, errno);
  leftover.keep();
}

}  // namespace calib8::files
