#include <png.h>

#include <csetjmp>
#include <cstring>
#include <vector>

#include "codec_plain.hpp"
#include "png_chunks.hpp"

namespace calib8::codec::plain {
namespace {

// libpng's state. It ends an error by jumping, so that no function here that it may jump out of
// has objects of its own.
class Reader {
 public:
  explicit Reader(std::string_view data) : left_(data) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail, warn);
    info_ = png_ == nullptr ? nullptr : png_create_info_struct(png_);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { png_destroy_read_struct(&png_, &info_, nullptr); }

  bool header() {
    if (info_ == nullptr || setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, [](png_structp png, png_bytep out, std::size_t size) {
      static_cast<Reader*>(png_get_io_ptr(png))->give(png, out, size);
    });
    png_read_info(png_, info_);
    return true;
  }

  // Eight bits: the upper byte of 16, without alpha; BGR, or grey by libpng's own weights.
  bool start(bool grey) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    const bool color = (png_get_color_type(png_, info_) & PNG_COLOR_MASK_COLOR) != 0;
    png_set_strip_16(png_);
    png_set_strip_alpha(png_);
    if (png_get_color_type(png_, info_) == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png_);
    if (!color) png_set_expand_gray_1_2_4_to_8(png_);
    if (grey && color) png_set_rgb_to_gray(png_, PNG_ERROR_ACTION_NONE, 0.299, 0.587);
    if (!grey && color) png_set_bgr(png_);
    if (!grey && !color) png_set_gray_to_rgb(png_);
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    return true;
  }

  bool read(unsigned char** rows) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_read_image(png_, rows);
    png_read_end(png_, info_);
    return true;
  }

  std::uint32_t width() const { return png_get_image_width(png_, info_); }
  std::uint32_t height() const { return png_get_image_height(png_, info_); }
  const std::vector<std::string>& said() const { return said_; }
  std::size_t row_bytes() const { return png_get_rowbytes(png_, info_); }

 private:
  static Reader& of(png_structp png) { return *static_cast<Reader*>(png_get_error_ptr(png)); }

  [[noreturn]] static void fail(png_structp png, png_const_charp words) {
    of(png).say("libpng error: ", words);
    png_longjmp(png, 1);
  }

  static void warn(png_structp png, png_const_charp words) {
    of(png).say("libpng warning: ", words);
  }

  // As libpng prints it.
  void say(const char* kind, const char* words) { said_.push_back(std::string(kind) + words); }

  void give(png_structp png, png_bytep out, std::size_t size) {
    if (size > left_.size()) png_error(png, "cut short");
    std::memcpy(out, left_.data(), size);
    left_.remove_prefix(size);
  }

  std::string_view left_;
  std::vector<std::string> said_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

Pixels pixels_of(Reader& reader, bool grey) {
  if (!reader.header()) return {};
  Pixels pixels(static_cast<int>(reader.height()), static_cast<int>(reader.width()), grey ? 1 : 3);
  if (!reader.start(grey) || reader.row_bytes() != pixels.row_bytes()) return {};
  std::vector<unsigned char*> rows;
  for (int y = 0; y < pixels.height; ++y) rows.push_back(pixels.row(y));
  return reader.read(rows.data()) ? pixels : Pixels();
}

}  // namespace

Decoded png(std::string_view data, bool grey) {
  if (png_chunks::body(data, "acTL")) {
    return {{},
            {"this build reads no animated PNG; convert the picture, or build calib8 with"
             " CALIB8_CODECS=opencv"}};
  }
  Reader reader(data);
  Decoded made;
  made.pixels = pixels_of(reader, grey);
  made.said = reader.said();
  return made;
}

std::string png_version() {
  const std::uint32_t version = png_access_version_number();
  return "libpng " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100);
}

}  // namespace calib8::codec::plain
