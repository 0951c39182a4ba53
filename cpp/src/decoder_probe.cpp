#include "calib8/decoder_probe.hpp"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/images.hpp"
#include "calib8/pixels.hpp"

namespace calib8 {
namespace {

constexpr int kDecodingVersion = 1;  // DECODING of deploy/calibration/fingerprint.py
constexpr std::size_t kDigestDigits = 16;

struct TestPicture {
  const char* name;
  std::string_view digits;
};

// JPEG of 21x18 with halved colours, turned by EXIF; PNG with 16 bits and alpha; WebP with losses.
constexpr TestPicture kTestPictures[] = {
    {"jpeg",
     "ffd8ffe100224578696600004d4d002a00000008000101120003000000010006000000000000ffe00010"
     "4a46494600010100000100010000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c"
     "1e17202e2931302e292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fff"
     "db0043010e0e0e131113261515264f352d354f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f"
     "4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4fffc00011080012001503012200021101"
     "031101ffc4001a000100020301000000000000000000000000040601020305ffc4002410000104020005"
     "050000000000000000000100020405031106122231323335517172ffc400180101000301000000000000"
     "0000000000000502030406ffc40024110001030301090000000000000000000001000203040511322122"
     "33344142517181ffda000c03010002110311003f008d4b666e9c41672696d751dc3a5ad2575879e1623b"
     "82d0df9d2f6601c164c7b4805cd0a354678c3c3c640c6c5828e6963696c270d3dbd555f0c3de31b3a28b"
     "16520c79afc4decd28ba78295ae89aef21241d6dc6f34e544a4f172b47087ad23e8a223ae1aa7f88ba6e"
     "64aadddfba66fd2222729f84df4150ed457fffd9"},
    {"png",
     "89504e470d0a1a0a0000000d4948445200000004000000031006000000e46472850000006e4944415408"
     "d70163009cff0305ccce14abb8ced59ff11ce223aae2c0f7fbcc58bebf3e0ffe7a622a15d8da85002618"
     "0c7b0042ffcac010a70130e43c0843636f584840f964cc35e5ce2d7fd81f01a0c664741da07e3609ef49"
     "c78dd6915a3e97e1004b1136ed488c53f56705cbf395ed2fb48327b7480000000049454e44ae426082"},
    {"webp",
     "52494646ce0000005745425056503820c20000003006009d012a150012003eb550a14c2724a322280aa8"
     "e016896c009d328478e2d42a33f6012ccdcf600216b556995e220e7ee1b1eff7586dbe0000de56eaccde"
     "59dfbfa35a72884c7c266b71de09c5348018ca1313a9b999316fc8359f3fa09c8d6c1c835c73d2fd9933"
     "bb781660ed7bd4c0f8ea18351bcf3a6cc434424e76ee0639b5cf55f3d69b96bf5ff5fb7d24a3e3814047"
     "43d4d6be22bbad7c9c7d78c750134d78244010196d9bc865b6700777df19003e8950198032651d048873"
     "a0900000"}};

struct ResizeCase {
  Interpolation interpolation;
  Size size;
};

constexpr ResizeCase kResizeCases[] = {{Interpolation::kLinear, {11, 9}},
                                       {Interpolation::kLinear, {40, 31}},
                                       {Interpolation::kArea, {11, 9}},
                                       {Interpolation::kCubic, {11, 9}}};

std::string from_hex(std::string_view digits) {
  std::string bytes;
  for (std::size_t k = 0; k + 1 < digits.size(); k += 2) {
    bytes += static_cast<char>(std::stoi(std::string(digits.substr(k, 2)), nullptr, 16));
  }
  return bytes;
}

std::string format_size(int height, int width) {
  return std::to_string(height) + "x" + std::to_string(width) + " ";
}

std::string decode_picture(const TestPicture& picture) {
  const Pixels pixels = images::decode(from_hex(picture.digits), picture.name, false);
  return format_size(pixels.height, pixels.width) +
         std::string(reinterpret_cast<const char*>(pixels.data.data()), pixels.data.size());
}

Pixels pattern() {
  Pixels pixels(23, 29, 3);
  for (int y = 0; y < pixels.height; ++y) {
    for (int k = 0; k < pixels.width * 3; ++k) {
      const int x = k / 3;
      pixels.row(y)[k] =
          static_cast<std::uint8_t>((y * 37 + x * 91 + k % 3 * 53 + y * x * 7) % 256);
    }
  }
  return pixels;
}

std::string resize_pattern(const ResizeCase& resize_case) {
  Preprocess preprocess;
  preprocess.size = resize_case.size;
  preprocess.interpolation = resize_case.interpolation;
  preprocess.color = Color::kBgr;
  preprocess.layout = Layout::kNhwc;
  const std::vector<float> values = apply(pattern(), preprocess);
  return format_size(resize_case.size.height, resize_case.size.width) +
         std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

std::string short_digest(const std::string& bytes) {
  return Sha256().update(bytes).hex().substr(0, kDigestDigits);
}

std::string run_probe() {
  nlohmann::ordered_json report{{"decoding", kDecodingVersion},
                                {"library", images::decoder_version()}};
  for (const TestPicture& picture : kTestPictures) {
    try {
      report[picture.name] = short_digest(decode_picture(picture));
    } catch (const FeedError&) {
      continue;  // this build does not read it
    }
  }
  std::string resized_bytes;
  for (const ResizeCase& resize_case : kResizeCases) resized_bytes += resize_pattern(resize_case);
  report["resize"] = short_digest(resized_bytes);
  return report.dump();
}

}  // namespace

std::string probe_decoder() {
  static const std::string report = run_probe();
  return report;
}

}  // namespace calib8
