// A temporary folder that goes with the test, and pictures to put in it.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "calib8/files.hpp"

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "calib8-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code failed;
    std::filesystem::remove_all(path_, failed);
  }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  void write(const std::string& name, const std::string& data) const {
    calib8::files::write(path_ / name, data);
  }

  // A picture of one colour (BGR), as PNG whatever its name; and its file's bytes.
  std::string picture(const std::string& name, int height, int width, int value) const {
    std::string rows;
    for (int y = 0; y < height; ++y) {
      rows += '\0';  // no filter
      for (int x = 0; x < width; ++x) {
        for (const int channel : {value / 4, value / 2, value}) rows += static_cast<char>(channel);
      }
    }
    std::string data = "\x89PNG\r\n\x1a\n";
    data += chunk("IHDR", number(width) + number(height) + std::string("\x08\x02\0\0\0", 5));
    data += chunk("IDAT", stored(rows)) + chunk("IEND", "");
    write(name, data);
    return data;
  }

 private:
  static std::string number(std::size_t value) {
    std::string bytes;
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift & 255U);
    return bytes;
  }
  static std::string number(int value) { return number(static_cast<std::size_t>(value)); }

  static std::string chunk(const std::string& name, const std::string& body) {
    std::uint32_t crc = 0xFFFFFFFFU;
    for (const char c : name + body) {
      crc ^= static_cast<unsigned char>(c);
      for (int k = 0; k < 8; ++k) crc = crc >> 1U ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
    }
    return number(body.size()) + name + body + number(std::size_t{~crc});
  }

  // zlib's form with nothing compressed: one block of at most 65,535 bytes, and its Adler-32.
  static std::string stored(const std::string& bytes) {
    std::uint32_t a = 1;
    std::uint32_t b = 0;
    for (const char c : bytes) {
      a = (a + static_cast<unsigned char>(c)) % 65521U;
      b = (b + a) % 65521U;
    }
    const std::string size = number(bytes.size()).substr(2);
    const std::string other = number(~bytes.size() & 0xFFFFU).substr(2);
    const std::string head{'\x78', '\x01', '\x01', size[1], size[0], other[1], other[0]};
    return head + bytes + number(std::size_t{b << 16U | a});
  }

  std::filesystem::path path_;
};
