#include <array>
#include <csetjmp>
#include <cstdio>
#include <utility>
#include <vector>

// clang-format off
#include <jpeglib.h>  // which needs <cstdio> and does not say so
// clang-format on

#include "codec_plain.hpp"

namespace calib8::codec::plain {
namespace {

// libjpeg's state. It ends an error by jumping, so that no function here that it may jump out of
// has objects of its own.
class Reader {
 public:
  Reader() {
    info_.err = jpeg_std_error(&errors_);
    info_.client_data = this;
    errors_.error_exit = [](j_common_ptr info) { std::longjmp(of(info).back_, 1); };
    errors_.emit_message = [](j_common_ptr info, int level) {
      if (level < 0) of(info).warn();
    };
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { jpeg_destroy_decompress(&info_); }

  bool header(const unsigned char* data, std::size_t size) {
    if (setjmp(back_) != 0) return false;
    jpeg_create_decompress(&info_);
    jpeg_mem_src(&info_, data, static_cast<unsigned long>(size));
    jpeg_read_header(&info_, TRUE);
    return true;
  }

  // Rows of 1 value a pixel, of 3 (BGR), or of 4 where the file is CMYK.
  bool start(bool grey) {
    if (setjmp(back_) != 0) return false;
    const bool inks = info_.num_components == 4;
    info_.out_color_space = inks ? JCS_CMYK : grey ? JCS_GRAYSCALE : JCS_EXT_BGR;
    jpeg_start_decompress(&info_);
    return true;
  }

  bool line(unsigned char* out) {
    if (setjmp(back_) != 0) return false;
    return jpeg_read_scanlines(&info_, &out, 1) == 1;
  }

  bool finish() {
    if (setjmp(back_) != 0) return false;
    return jpeg_finish_decompress(&info_) != 0;
  }

  int width() const { return static_cast<int>(info_.image_width); }
  int height() const { return static_cast<int>(info_.image_height); }
  int components() const { return info_.output_components; }
  const std::vector<std::string>& said() const { return said_; }

 private:
  static Reader& of(j_common_ptr info) { return *static_cast<Reader*>(info->client_data); }

  // libjpeg itself tells of the first warning alone.
  void warn() {
    if (errors_.num_warnings++ > 0) return;
    std::array<char, JMSG_LENGTH_MAX> text{};
    errors_.format_message(reinterpret_cast<j_common_ptr>(&info_), text.data());
    said_.emplace_back(text.data());
  }

  jpeg_decompress_struct info_{};
  jpeg_error_mgr errors_{};
  std::jmp_buf back_{};
  std::vector<std::string> said_;
};

// Four inks, inverted as all programs write them, to BGR.
void from_inks(const std::vector<unsigned char>& line, bool grey, std::uint8_t* out) {
  for (std::size_t k = 0; k + 3 < line.size(); k += 4) {
    const int black = line[k + 3];
    const auto light = [black](int ink) { return black - ((255 - ink) * black >> 8); };
    const int red = light(line[k]);
    const int green = light(line[k + 1]);
    const int blue = light(line[k + 2]);
    if (grey) {
      *out++ =
          static_cast<std::uint8_t>((blue * 1868 + green * 9617 + red * 4899 + (1 << 13)) >> 14);
    } else {
      for (const int value : {blue, green, red}) *out++ = static_cast<std::uint8_t>(value);
    }
  }
}

bool read_lines(Reader& reader, bool grey, Pixels& out) {
  if (reader.components() != 4) {
    for (int y = 0; y < out.height; ++y) {
      if (!reader.line(out.row(y))) return false;
    }
    return reader.finish();
  }
  std::vector<unsigned char> inks(static_cast<std::size_t>(out.width) * 4);
  for (int y = 0; y < out.height; ++y) {
    if (!reader.line(inks.data())) return false;
    from_inks(inks, grey, out.row(y));
  }
  return reader.finish();
}

}  // namespace

Decoded jpeg(std::string_view data, bool grey) {
  Decoded made;
  Reader reader;
  if (!reader.header(reinterpret_cast<const unsigned char*>(data.data()), data.size())) {
    made.said = reader.said();
    return made;
  }
  Pixels pixels(reader.height(), reader.width(), grey ? 1 : 3);
  const bool whole = reader.start(grey) && read_lines(reader, grey, pixels);
  made.said = reader.said();
  if (whole) made.pixels = std::move(pixels);
  return made;
}

std::string jpeg_version() {
  constexpr int kVersion = LIBJPEG_TURBO_VERSION_NUMBER;
  return "libjpeg-turbo " + std::to_string(kVersion / 1000000) + "." +
         std::to_string(kVersion / 1000 % 1000) + "." + std::to_string(kVersion % 1000);
}

}  // namespace calib8::codec::plain
