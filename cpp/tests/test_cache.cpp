#include <cmath>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "calib8/cache.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;
namespace fs = std::filesystem;

namespace {

const std::string kSample =
    "TRT-8503-EntropyCalibration2\ndata: 3c008912\nconv/Conv2D:0: 3c60dd38\n"
    "(Unnamed Layer* 4) [Shuffle]_output: 0\nmask: 7f800000\nodd: ffc00000\n";

std::string hex(const std::string& bytes) {
  std::ostringstream out;
  for (const char c : bytes) {
    out << std::hex << std::setw(2) << std::setfill('0') << (static_cast<unsigned>(c) & 0xFFU);
  }
  return out.str();
}

std::vector<fs::path> caches_below(const fs::path& folder) {
  std::vector<fs::path> found;
  if (!fs::exists(folder)) return found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() == ".cache") found.push_back(entry.path());
  }
  return found;
}

}  // namespace

TEST_CASE("a cache is read entry by entry and written back byte for byte") {
  const CalibrationCache cache = parse_cache(kSample, "x");
  REQUIRE(cache.entries.size() == 5);
  CHECK(cache.header.label == 8503);
  CHECK(cache.header.algorithm == kEntropy2);
  CHECK(cache.entries[0].scale() == Approx(0.99634 / 127).epsilon(1e-5));
  CHECK(cache.entries[1].name == "conv/Conv2D:0");
  CHECK(cache.entries[2].flaw() == "zero");
  CHECK(cache.entries[3].flaw() == "inf");
  CHECK(cache.entries[4].flaw() == "NaN");
  CHECK_FALSE(cache.entries[0].flaw());
  CHECK(cache.dump() == kSample);
}

TEST_CASE("real caches come back byte for byte, and their namesake is told apart") {
  const fs::path root = CALIB8_REPOSITORY;
  std::vector<fs::path> paths = caches_below(root / "tests" / "golden");
  const fs::path third_party = root / ".." / "shared" / "golden" / "tensorrt";
  for (const fs::path& path : caches_below(third_party)) paths.push_back(path);
  if (paths.empty()) std::cout << "skipped: no cache in tests/golden\n";
  for (const fs::path& path : paths) {
    INFO(path);
    if (path.filename().string().rfind("NOT_TRT_", 0) == 0) {
      CHECK_THROWS_WITH(read_cache(path), Catch::Contains("onnxruntime's own calibration table"));
      continue;
    }
    CHECK(read_cache(path).dump() == files::read(path));
  }
}

TEST_CASE("the golden caches hold what expected.json says") {
  const fs::path folder = fs::path(CALIB8_REPOSITORY) / "tests" / "golden" / "caches";
  const auto golden = nlohmann::json::parse(files::read(folder / "expected.json"));
  REQUIRE(golden.size() >= 4);
  for (const auto& [name, expected] : golden.items()) {
    INFO(name);
    const CalibrationCache cache = read_cache(folder / name);
    CHECK((expected["label"].is_null() ? !cache.header.label
                                       : cache.header.label == expected["label"]));
    CHECK(cache.header.algorithm == expected["algorithm"].get<std::string>());
    auto entries = nlohmann::json::array();
    for (const Entry& entry : cache.entries) entries.push_back({hex(entry.name), entry.bits()});
    CHECK(entries == expected["entries"]);
  }
}

TEST_CASE("duplicates are kept, and told where they contradict each other") {
  const CalibrationCache same = parse_cache("TRT-8503-A\na: 1\nb: 2\na: 1\n", "x");
  CHECK(same.duplicates() == std::vector<std::string>{"a"});
  CHECK(same.scales().size() == 2);
  const CalibrationCache other = parse_cache("TRT-8503-A\na: 1\na: 2\n", "x");
  CHECK_THROWS_WITH(other.scales(), Catch::Contains("got 'a' with 1 and 2"));
}

TEST_CASE("broken caches are refused with the line and the way out") {
  const auto refused = [](const std::string& data, const std::string& words) {
    INFO(data);
    CHECK_THROWS_WITH(parse_cache(data, "f.cache"), Catch::Contains(words));
    CHECK_THROWS_AS(parse_cache(data, "f.cache"), CacheError);
  };
  refused("", "f.cache is empty");
  refused("TRT-8503-EntropyCalibration2\n", "ends after its first line");
  refused("TRT-8503-A\na: 3d8\nb: 3d8", "stops in the midst of line 3");
  refused("TRT-8503-A\na 3d8\n", "line 2 of f.cache is 'a 3d8'");
  refused("TRT-8503-A\na: 123456789\n", "1 to 8 hex digits");
  refused("TRT-85-A\na: 1\n", "damaged first line 'TRT-85-A'");
  refused("{\"a\": 1}\n", "is JSON");
  refused(std::string("\x80\x04K\x01.", 5), "is a binary file");
}

TEST_CASE("versions become labels and back") {
  CHECK(version_label("8.5.3") == 8503);
  CHECK(version_label(" 8.5.3.1 ") == 8503);
  CHECK(version_label("10.14.1") == 101401);
  CHECK(label_to_version(8503) == "8.5.3");
  CHECK(label_to_version(101401) == "10.14.1");
  for (const char* wrong : {"8.5", "8.12.0", "x", "8.5.3.x", "", "8..3", "8.5.3.1.2", "100.1.1"}) {
    CHECK_THROWS_AS(version_label(wrong), CacheError);
  }
}

TEST_CASE("scales are written as TensorRT writes them") {
  const NamedScales scales{{"a", 1.0F}, {"zero", 0.0F}, {"b c", 0.5F}};
  const CalibrationCache cache = cache_from_scales(scales, {"8.5.3"});
  CHECK(cache.dump() == "TRT-8503-EntropyCalibration2\na: 3f800000\nzero: 0\nb c: 3f000000\n");
  const CacheOptions legacy{"8.5.3", std::string(kLegacy)};
  CHECK(cache_from_scales(scales, legacy).header.text == "03ff00000000000003feffffde7210be9");
  CHECK(relabel(cache, "10.3.0").header.text == "TRT-100300-EntropyCalibration2");
  CHECK_THROWS_AS(cache_from_scales({}, {"8.5.3"}), CacheError);
  CHECK_THROWS_AS(cache_from_scales({{"a", -1.0F}}, {"8.5.3"}), CacheError);
  CHECK_THROWS_AS(cache_from_scales({{"a", std::nanf("")}}, {"8.5.3"}), CacheError);
  CHECK_THROWS_AS(cache_from_scales({{"a\n", 1.0F}}, {"8.5.3"}), CacheError);
}

TEST_CASE("a file is written whole or not at all") {
  const Folder folder;
  folder.write("a/b.cache", kSample);
  CHECK(read_cache(folder / "a/b.cache").entries.size() == 5);
  folder.write("a/b.cache", "new");
  CHECK(files::read(folder / "a/b.cache") == "new");
  CHECK(std::distance(fs::directory_iterator(folder / "a"), fs::directory_iterator()) == 1);
  CHECK_THROWS_WITH(folder.write("a/b.cache/c", "x"), Catch::Contains("must be writable"));
  CHECK_THROWS_AS(read_cache(folder / "none"), CacheError);
}
