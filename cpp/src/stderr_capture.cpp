#include "stderr_capture.hpp"

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

// stderr is a variable in glibc. While any thread captures, it is a stream that checks which thread
// each write comes from:
//
//   fprintf(stderr, ...) --> stream --+-- a thread that captures: its text
//                                     `-- another:                descriptor 2, the screen
namespace calib8 {
namespace {

thread_local std::string* captured_text = nullptr;  // null: this thread does not capture

#ifdef __GLIBC__
constexpr std::size_t kMaxBytes = std::size_t{1} << 16U;  // of text that is stored

ssize_t capture_or_write(void* /*cookie*/, const char* data, std::size_t size) {
  if (captured_text == nullptr) return ::write(STDERR_FILENO, data, size);
  try {
    const std::size_t free_bytes = kMaxBytes - std::min(kMaxBytes, captured_text->size());
    captured_text->append(data, std::min(size, free_bytes));
  } catch (...) {
    return 0;  // out of memory: the text is lost
  }
  return static_cast<ssize_t>(size);
}

// Made once and never closed, since a thread may be about to write to it.
std::FILE* capturing_stream() {
  static std::FILE* const stream = [] {
    std::FILE* opened = ::fopencookie(nullptr, "a", {nullptr, capture_or_write, nullptr, nullptr});
    if (opened != nullptr) std::setvbuf(opened, nullptr, _IONBF, 0);
    return opened;
  }();
  return stream;
}

// The buffer of std::cerr while any thread captures: drops what such a thread prints.
class CerrFilter : public std::streambuf {
 public:
  std::streambuf* original = nullptr;

 private:
  int overflow(int c) override {
    if (c == traits_type::eof()) return traits_type::not_eof(c);
    return captured_text != nullptr ? c : original->sputc(traits_type::to_char_type(c));
  }
  std::streamsize xsputn(const char* data, std::streamsize size) override {
    return captured_text != nullptr ? size : original->sputn(data, size);
  }
  int sync() override { return captured_text != nullptr ? 0 : original->pubsync(); }
};

// The number of captures in all threads, and the stderr from before the first of them.
struct CaptureState {
  std::mutex mutex;
  int capture_count = 0;
  std::FILE* original_stderr = nullptr;
  CerrFilter cerr_filter;
};

CaptureState& capture_state() {
  static auto* const state = new CaptureState;  // never deleted: std::cerr may be used to the last
  return *state;
}

void start_capture() {
  std::FILE* const stream = capturing_stream();
  if (stream == nullptr) return;
  CaptureState& state = capture_state();
  const std::lock_guard lock(state.mutex);
  if (state.capture_count++ > 0) return;
  state.original_stderr = stderr;
  stderr = stream;
  state.cerr_filter.original = std::cerr.rdbuf(&state.cerr_filter);
}

void end_capture() {
  if (capturing_stream() == nullptr) return;
  CaptureState& state = capture_state();
  const std::lock_guard lock(state.mutex);
  if (--state.capture_count > 0) return;
  stderr = state.original_stderr;
  std::cerr.rdbuf(state.cerr_filter.original);
}
#else
void start_capture() {}
void end_capture() {}
#endif

std::string printable_ascii(std::string_view line) {
  std::string result;
  for (const char c : line) {
    if (c >= ' ' && c <= '~') result += c;
  }
  return std::string(text::strip(result));
}

}  // namespace

StderrCapture::StderrCapture() : outer_text_(captured_text) {
  captured_text = &text_;
  start_capture();
}

StderrCapture::~StderrCapture() {
  end_capture();
  captured_text = outer_text_;
}

std::vector<std::string> StderrCapture::lines() const {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text_.size();) {
    const std::size_t end = std::min(text_.find_first_of("\n\r", begin), text_.size());
    std::string line = printable_ascii(std::string_view(text_).substr(begin, end - begin));
    if (!line.empty()) lines.push_back(std::move(line));
    begin = end + 1;
  }
  return lines;
}

}  // namespace calib8
