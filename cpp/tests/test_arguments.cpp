// What the public functions are given: anything may be wrong with it, and is told in the error tree.
#include <sys/stat.h>

#include <cmath>
#include <limits>

#include "calib8/cache.hpp"
#include "calib8/entropy.hpp"
#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "calib8/fingerprint.hpp"
#include "calib8/histogram.hpp"
#include "calib8/latency.hpp"
#include "calib8/pixels.hpp"
#include "calib8/text.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

namespace {

const std::string kCache = "TRT-8601-EntropyCalibration2\nimage: 3c008912\n";
const std::string kPipe = " cannot be read: it is no regular file";

Fingerprint fingerprint() {
  Fingerprint edited;
  edited.model.graph = std::string(64, 'a');
  edited.method = "MinMaxCalibration";
  edited.versions = R"({"tensorrt": "8.6.1"})";
  return edited;
}

std::string brackets(std::size_t count) { return std::string(count, '['); }

}  // namespace

TEST_CASE("a histogram folds into bins that divide it alone") {
  Histogram seen;
  for (const std::int64_t bins : {-1, 0, 3, 4095, 8192}) {
    CHECK_THROWS_AS(seen.magnitudes(bins), CalibrationError);
  }
  CHECK(seen.magnitudes(2048).size() == 2048);
  CHECK(seen.magnitudes(1).size() == 1);
}

TEST_CASE("a divergence is of the bins that there are") {
  const std::vector<double> h(2048, 1.0);
  for (const int i : {-1, 0, 127, 2049}) {
    CHECK_THROWS_AS(entropy::divergence(h, i), CalibrationError);
  }
  CHECK_THROWS_AS(entropy::divergence({1.0, 2.0}, 128), CalibrationError);
  CHECK(std::isfinite(entropy::divergence(h, 2048)));
}

TEST_CASE("a range is of a number") {
  CHECK_THROWS_AS(range_for(std::numeric_limits<double>::infinity()), CalibrationError);
  CHECK_THROWS_AS(range_for(std::nan("")), CalibrationError);
  CHECK(range_for(3) == 4);
}

TEST_CASE("a shape is of any integers") {
  const std::size_t height = 16;
  const long long width = 20;
  const TensorSpec spec{"image", "float32", {"n", std::uint8_t{3}, height, width}};
  CHECK(spec.describe() == "'image' float32 [n, 3, 16, 20]");
}

TEST_CASE("a picture is of the size and the channels that are said") {
  Preprocess how;
  CHECK_THROWS_AS(apply(Pixels(4, 4, 3), how), ConfigError);
  how.size = Size{4, 4};
  how.color = Color::kGrey;
  CHECK_THROWS_AS(apply(Pixels(4, 4, 3), how), FeedError);
  CHECK(apply(Pixels(4, 4, 1), how).size() == 16);
}

TEST_CASE("a percentile is of samples") {
  CHECK_THROWS_AS(percentile({}, 50), ConfigError);
  CHECK_THROWS_AS(percentile({1.0}, 101), ConfigError);
  CHECK(percentile({1.0}, 0) == 1.0);
}

TEST_CASE("a scale of other digits than hex is told") {
  for (const char* digits : {"zz", "", "123456789", "-1", "0x1"}) {
    const Entry entry{"a", digits};
    CHECK_THROWS_AS(entry.bits(), CacheError);
    CHECK_THROWS_AS(entry.scale(), CacheError);
    CHECK_THROWS_AS(entry.flaw(), CacheError);
  }
}

TEST_CASE("a fingerprint is made of a manifest, and kept whole or not at all") {
  const Folder folder;
  Fingerprint edited = fingerprint();
  for (const char* manifest : {"garbage", "", "[]", "{}", "{\"preprocess\": 1}"}) {
    CHECK_THROWS_AS(set_feed(edited, manifest), FeedError);
  }
  CHECK_THROWS_AS(set_feed(edited, brackets(200000)), FeedError);
  for (std::string Fingerprint::*part :
       {&Fingerprint::images, &Fingerprint::preprocess, &Fingerprint::versions}) {
    edited = fingerprint();
    edited.*part = "";
    CHECK_THROWS_AS(save_calibration(folder / "a.cache", kCache, edited), CacheError);
    CHECK_FALSE(std::filesystem::exists(folder / "a.cache"));
  }
  edited = fingerprint();
  edited.method = "\xff";  // no UTF-8
  CHECK_NOTHROW(edited.to_json());
}

TEST_CASE("JSON of brackets in brackets is no JSON, however it comes") {
  const Folder folder;
  save_calibration(folder / "a.cache", kCache, fingerprint());
  CHECK_FALSE(describe_mismatch(folder / "a.cache", fingerprint()));
  const std::string deep = brackets(200000) + std::string(200000, ']');
  for (const std::string& text : {deep, "{\"schema\": 2, \"fingerprint\": " + deep + "}"}) {
    folder.write("a.cache.json", text);
    CHECK(describe_mismatch(folder / "a.cache", fingerprint())->find("is not a fingerprint") !=
          std::string::npos);
  }
  CHECK_THROWS_AS(Preprocess::from_json(deep), ConfigError);
  CHECK_THROWS_AS(Preprocess::from_json("{\"size\": " + deep + "}"), ConfigError);
  CHECK_THROWS_AS(Fingerprint::from_json(deep), CacheError);
  CHECK_NOTHROW(Preprocess::from_json("{\"mean\": [0.5]}"));
  CHECK_THROWS_WITH(Preprocess::from_json("{\"" + brackets(100) + "\\\"\": 1}"),
                    Catch::Contains("is no preprocessing option"));  // brackets of a text are none
}

TEST_CASE("a pipe, a device or a folder is no file, and is not waited for") {
  const Folder folder;
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  for (const std::filesystem::path& path :
       {folder / "pipe", std::filesystem::path("/dev/zero"), folder.path()}) {
    CHECK_THROWS_WITH(files::read(path), Catch::EndsWith(kPipe));
    CHECK_THROWS_AS(read_cache(path), CacheError);
  }
  CHECK_THROWS_WITH(files::write(folder / "pipe", "x"), Catch::Contains("got a device"));
  CHECK(std::filesystem::is_fifo(folder / "pipe"));
  CHECK_THROWS_WITH(files::read(folder / "none"), Catch::EndsWith("No such file or directory"));
  save_calibration(folder / "a.cache", kCache, fingerprint());
  std::filesystem::remove(folder / "a.cache");
  REQUIRE(::mkfifo((folder / "a.cache").c_str(), 0600) == 0);
  CHECK(describe_mismatch(folder / "a.cache", fingerprint())->find(kPipe) != std::string::npos);
  std::filesystem::remove(folder / "a.cache.json");
  REQUIRE(::mkfifo((folder / "a.cache.json").c_str(), 0600) == 0);
  CHECK(describe_mismatch(folder / "a.cache", fingerprint())->find(kPipe) != std::string::npos);
}

TEST_CASE("a file is read up to a size alone") {
  const Folder folder;
  folder.write("a", std::string(3 << 20, 'x'));
  CHECK(files::read(folder / "a").size() == 3 << 20);
  CHECK_THROWS_WITH(files::read(folder / "a", 2 << 20), Catch::Contains("over 2 MB"));
  std::filesystem::resize_file(folder / "a", std::uintmax_t{50} << 30U);
  CHECK_THROWS_AS(read_cache(folder / "a"), CacheError);
  CHECK_THROWS_AS(files::read(folder / "a"), FeedError);
}

TEST_CASE("white space is Unicode's") {
  CHECK(text::strip("\xC2\xA0 a\xE3\x80\x80\x1f") == "a");
  CHECK(text::strip("\xE2\x80\x8B") == "\xE2\x80\x8B");  // without a width, and no space
  CHECK(text::strip("\xA0") == "\xA0");                  // a byte that is no UTF-8
  CHECK(text::strip(" \x85\xC2\x85").size() == 1);
  const auto [name, token] = text::split_last("a b\xE2\x80\xA8\t7");
  CHECK(name == "a b");
  CHECK(token == "7");
  CHECK(text::split_last("ab").second.empty());
}
