#include "overheard.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <streambuf>
#include <string_view>

#include "calib8/text.hpp"

#ifdef __GLIBC__
#include <unistd.h>
#endif

// stderr is a variable in glibc. While anybody listens it is a stream that asks, of every write,
// whose thread it comes from:
//
//   fprintf(stderr, ...) --> stream --+-- this thread listens: its text
//                                     `-- another:             descriptor 2, the screen
namespace calib8 {
namespace {

thread_local std::string* heard = nullptr;

#ifdef __GLIBC__
constexpr std::size_t kMost = std::size_t{1} << 16U;  // bytes that are kept

ssize_t take(void* /*cookie*/, const char* data, std::size_t size) {
  if (heard == nullptr) return ::write(STDERR_FILENO, data, size);
  try {
    heard->append(data, std::min(size, kMost - std::min(kMost, heard->size())));
  } catch (...) {
    return 0;  // a word is lost
  }
  return static_cast<ssize_t>(size);
}

// Made once and never closed, since a thread may be about to write to it.
std::FILE* listening() {
  static std::FILE* const stream = [] {
    std::FILE* made = ::fopencookie(nullptr, "a", {nullptr, take, nullptr, nullptr});
    if (made != nullptr) std::setvbuf(made, nullptr, _IONBF, 0);
    return made;
  }();
  return stream;
}

// Takes std::cerr's place: a thread that listens is not shown.
class Cerr : public std::streambuf {
 public:
  std::streambuf* own = nullptr;

 private:
  int overflow(int c) override {
    if (c == traits_type::eof()) return traits_type::not_eof(c);
    return heard != nullptr ? c : own->sputc(traits_type::to_char_type(c));
  }
  std::streamsize xsputn(const char* data, std::streamsize size) override {
    return heard != nullptr ? size : own->sputn(data, size);
  }
  int sync() override { return heard != nullptr ? 0 : own->pubsync(); }
};

// How many listen, and what stderr was before the first of them did.
struct Listeners {
  std::mutex mutex;
  int count = 0;
  std::FILE* own = nullptr;
  Cerr cerr;
};

Listeners& listeners() {
  static auto* const all = new Listeners;  // never gone: std::cerr may be used to the last
  return *all;
}

void open_ear() {
  std::FILE* const stream = listening();
  if (stream == nullptr) return;
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  if (all.count++ > 0) return;
  all.own = stderr;
  stderr = stream;
  all.cerr.own = std::cerr.rdbuf(&all.cerr);
}

void close_ear() {
  if (listening() == nullptr) return;
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  if (--all.count > 0) return;
  stderr = all.own;
  std::cerr.rdbuf(all.cerr.own);
}
#else
void open_ear() {}
void close_ear() {}
#endif

std::string printable(std::string_view line) {
  std::string kept;
  for (const char c : line) {
    if (c >= ' ' && c <= '~') kept += c;
  }
  return std::string(text::strip(kept));
}

}  // namespace

Overheard::Overheard() : before_(heard) {
  heard = &said_;
  open_ear();
}

Overheard::~Overheard() {
  close_ear();
  heard = before_;
}

std::vector<std::string> Overheard::lines() const {
  std::vector<std::string> found;
  for (std::size_t at = 0; at < said_.size();) {
    const std::size_t end = std::min(said_.find_first_of("\n\r", at), said_.size());
    std::string line = printable(std::string_view(said_).substr(at, end - at));
    if (!line.empty()) found.push_back(std::move(line));
    at = end + 1;
  }
  return found;
}

}  // namespace calib8
