// Feeds the cache reader with seeded mutations of sound caches: `fuzz_cache COUNT [SEED]`.
// Whatever the bytes, it reads them (and writes the same bytes back) or throws CacheError.
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "calib8/cache.hpp"
#include "calib8/errors.hpp"

namespace {

using std::string_view_literals::operator""sv;

const std::vector<std::string> kSeeds{
    "TRT-8503-EntropyCalibration2\ndata: 3c008912\nconv/Conv2D:0: 3c60dd38\n"
    "(Unnamed Layer* 4) [Shuffle]_output: 0\nmask: 7f800000\nodd: ffc00000\n",
    "TRT-101401-EntropyCalibration2\r\nimages: 3bece9d4\r\n/model.0/act/Mul: 3d000000\r\n",
    "03ff00000000000003feffffde7210be9\ndata: 3c008102\nprob: 3c010204\n",
    "conv1 1.25\nfc -3e-2\n",
    "record {\n  key: \"conv\"\n}\n",
    "{\"conv\": [0, 1]}\n",
};

constexpr std::string_view kPieces[] = {"\n"sv,
                                        "\r"sv,
                                        ": "sv,
                                        "TRT-"sv,
                                        "-"sv,
                                        "0"sv,
                                        "7f800000"sv,
                                        "\0"sv,
                                        "\xff"sv,
                                        "'"sv,
                                        "\\"sv,
                                        "ffffffff"sv,
                                        "\xe2\x82\xac"sv,
                                        "\xed\xa0\x80"sv,
                                        "ptrt"sv,
                                        "PK\x03\x04"sv,
                                        "{"sv,
                                        "EntropyCalibration"sv,
                                        " "sv,
                                        "\x08\x12"sv,
                                        "1e5"sv};

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::string next() {
    std::string data = kSeeds[below(kSeeds.size())];
    for (std::size_t edits = 1 + below(4); edits > 0; --edits) edit(data);
    return data;
  }

 private:
  std::size_t below(std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random_);
  }

  void edit(std::string& data) {
    const std::size_t at = below(data.size() + 1);
    switch (below(6)) {
      case 0: data.insert(at, kPieces[below(std::size(kPieces))]); break;
      case 1: data.erase(at, 1 + below(9)); break;
      case 2: data.resize(at); break;
      case 3: data += kSeeds[below(kSeeds.size())]; break;
      case 4: data.insert(0, kPieces[below(std::size(kPieces))]); break;
      default:
        if (at < data.size()) data[at] = static_cast<char>(below(256));
    }
  }

  std::mt19937_64 random_;
};

void use(const calib8::CalibrationCache& cache) {
  for (const calib8::Entry& entry : cache.entries) static_cast<void>(entry.flaw());
  static_cast<void>(cache.duplicates());
  static_cast<void>(cache.scales());
  static_cast<void>(calib8::relabel(cache, "8.6.1", "EntropyCalibration2"));
}

}  // namespace

int main(int argc, char** argv) {
  const long count = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 20000;
  Mutator mutator(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 8);
  long read = 0;
  for (long k = 0; k < count; ++k) {
    const std::string data = mutator.next();
    try {
      const calib8::CalibrationCache cache = calib8::parse_cache(data, "fuzz");
      ++read;
      if (cache.dump() != data) {
        std::cerr << "input " << k << " does not come back byte for byte\n";
        return 1;
      }
      use(cache);
    } catch (const calib8::CacheError&) {
      continue;
    }
  }
  std::cout << count << " inputs, " << read << " read, " << count - read << " refused\n";
  return read > 0 && read < count ? 0 : 1;
}
