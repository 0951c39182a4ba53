#include <cmath>
#include <cstring>

#include "calib8/calibration_job.hpp"
#include "calib8/errors.hpp"
#include "calib8/fingerprint.hpp"
#include "calib8/latency.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

namespace {

const TensorSpec kSpec{"image", "float32", {2, 3, 16, 20}};
const std::string kCache = "TRT-8601-EntropyCalibration2\nimage: 3c008912\n";

// What TensorRT does with a calibrator: asks for batches until there are none, writes the cache.
struct Engine {
  std::vector<std::vector<float>> seen;
  std::vector<float> device;

  CalibrationJob::Upload upload() {
    return [this](const Tensor& tensor) {
      device.assign(tensor.floats(), tensor.floats() + tensor.bytes.size() / sizeof(float));
      return device.data();
    };
  }

  void calibrate(CalibrationJob& job, const char* name, std::size_t most = 1000) {
    std::size_t length = 0;
    if (job.read(length) != nullptr) return;
    void* binding = nullptr;
    for (; most > 0 && job.next(&binding, &name, 1); --most) {
      const auto* values = static_cast<const float*>(binding);
      seen.emplace_back(values, values + device.size());
    }
    job.write(kCache.data(), kCache.size());
  }
};

Feed feed_of(const Folder& folder) { return Feed(folder.path(), kSpec, {}); }

}  // namespace

TEST_CASE("all whole batches are taken and the written cache comes out") {
  const Folder folder;
  for (int k = 0; k < 5; ++k)
    folder.sample(std::to_string(k) + ".npy", 0.1F * static_cast<float>(k));
  Engine engine;
  CalibrationJob job(feed_of(folder), engine.upload(), std::nullopt);
  CHECK(job.batch() == 2);
  engine.calibrate(job, "image");
  CHECK(engine.seen.size() == 2);
  CHECK(engine.seen[0] != engine.seen[1]);
  CHECK(job.check() == kCache);
  CHECK(feed_of(folder).whole_batches().notes().back() ==
        "TensorRT calibrates in whole batches, of 2 samples here: the last 1"
        " of 5 samples fill none and were left out");
}

TEST_CASE("batches that a function made in memory are taken") {
  float value = 0;
  const Feed feed(
      [&value]() -> std::optional<Sample> {
        if (value == 5) return std::nullopt;
        return Sample{Tensor::of("image", {3, 16, 20}, std::vector<float>(960, value++))};
      },
      kSpec, {});
  Engine engine;
  CalibrationJob job(feed, engine.upload(), std::nullopt);
  engine.calibrate(job, "image");
  REQUIRE(engine.seen.size() == 2);
  CHECK(engine.seen[1].front() == 2);
  CHECK(engine.seen[1].back() == 3);
  CHECK(job.check() == kCache);
}

TEST_CASE("fewer samples than a batch are told before TensorRT starts") {
  const Folder folder;
  folder.sample("a.npy", 1);
  Engine engine;
  const Feed feed = feed_of(folder);
  CHECK_THROWS_WITH(CalibrationJob(feed, engine.upload(), std::nullopt),
                    Catch::Contains("got 1 samples for batches of 2"));
  CHECK(CalibrationJob(feed, engine.upload(), kCache).check() == kCache);
}

TEST_CASE("bad files that leave no whole batch are told after the build") {
  const Folder folder;
  folder.sample("a.npy", 1);
  folder.write("b.npy", "no array");
  Engine engine;
  FeedOptions options;
  options.skip_bad = true;
  CalibrationJob job(Feed(folder.path(), kSpec, options), engine.upload(), std::nullopt);
  engine.calibrate(job, "image");
  CHECK_THROWS_WITH(job.check(), Catch::Contains("got 1 samples for batches of 2"));
}

TEST_CASE("a new cache is kept at once, and is there for a second build") {
  const Folder folder;
  for (int k = 0; k < 4; ++k)
    folder.sample(std::to_string(k) + ".npy", 0.1F * static_cast<float>(k));
  Engine engine;
  std::string stored_text;
  const auto keep = [&stored_text](const std::string& cache) { stored_text = cache; };
  CalibrationJob job(feed_of(folder), engine.upload(), std::nullopt, keep);
  engine.calibrate(job, "image");
  CHECK(stored_text == kCache);
  std::size_t length = 0;
  const void* again = job.read(length);
  CHECK(std::string(static_cast<const char*>(again), length) == kCache);
  stored_text.clear();
  CalibrationJob early(feed_of(folder), engine.upload(), std::nullopt, keep);
  engine.calibrate(early, "image", 1);
  CHECK(stored_text.empty());
  const auto full = [](const std::string&) { throw ExportError("no space left"); };
  CalibrationJob not_stored(feed_of(folder), engine.upload(), std::nullopt, full);
  engine.calibrate(not_stored, "image");
  CHECK_THROWS_WITH(not_stored.check(), "no space left");
}

TEST_CASE("a known cache that TensorRT refuses is told, and no batch is given in its place") {
  const Folder folder;
  for (int k = 0; k < 4; ++k)
    folder.sample(std::to_string(k) + ".npy", 0.1F * static_cast<float>(k));
  Engine engine;
  CalibrationJob job(feed_of(folder), engine.upload(), kCache);
  const char* name = "image";
  void* binding = nullptr;
  CHECK_FALSE(job.next(&binding, &name, 1));
  CHECK_THROWS_WITH(job.check(), Catch::Contains("refused it and asked for batches"));
}

TEST_CASE("a known cache is handed over and no sample is read") {
  const Folder folder;
  folder.sample("a.npy", std::nanf(""));
  Engine engine;
  CalibrationJob job(feed_of(folder), engine.upload(), kCache);
  engine.calibrate(job, "image");
  CHECK(engine.seen.empty());
  CHECK(job.check() == kCache);
}

TEST_CASE("what goes wrong inside a callback is thrown after the build") {
  const Folder folder;
  folder.sample("a.npy", 1);
  folder.sample("b.npy", 1);
  Engine engine;
  SECTION("a bad sample") {
    folder.sample("c.npy", std::nanf(""));
    folder.sample("d.npy", 1);
    CalibrationJob job(feed_of(folder), engine.upload(), std::nullopt);
    engine.calibrate(job, "image");
    CHECK_THROWS_WITH(job.check(), Catch::Contains("c.npy holds 960 NaN or Inf values"));
  }
  SECTION("an upload that fails") {
    const auto refuse = [](const Tensor&) -> void* { throw BackendError("out of memory"); };
    CalibrationJob job(feed_of(folder), refuse, std::nullopt);
    engine.calibrate(job, "image");
    CHECK_THROWS_AS(job.check(), BackendError);
  }
  SECTION("another input") {
    CalibrationJob job(feed_of(folder), engine.upload(), std::nullopt);
    engine.calibrate(job, "mask");
    CHECK_THROWS_WITH(job.check(), Catch::Contains("fed, ['image'], got ['mask']"));
  }
}

TEST_CASE("a calibration that stops early or writes nothing is told") {
  const Folder folder;
  for (int k = 0; k < 5; ++k)
    folder.sample(std::to_string(k) + ".npy", 0.1F * static_cast<float>(k));
  Engine engine;
  CalibrationJob early(feed_of(folder), engine.upload(), std::nullopt);
  engine.calibrate(early, "image", 1);
  CHECK_THROWS_WITH(early.check(), Catch::Contains("every batch, got 1 of 2"));
  CalibrationJob silent(feed_of(folder), engine.upload(), std::nullopt);
  const char* name = "image";
  void* binding = nullptr;
  while (silent.next(&binding, &name, 1)) continue;
  CHECK(silent.has_started());
  CHECK_THROWS_WITH(silent.check(), Catch::Contains("wrote no calibration cache"));
}

TEST_CASE("a cache is used again only while its fingerprint fits") {
  const Folder folder;
  folder.sample("a.npy", 1);
  const Feed feed(folder.path(), kSpec, {});
  Fingerprint now;
  now.model.file = std::string(64, 'a');
  now.rule = "whole batches of 2";
  now.method = "EntropyCalibration2";
  set_feed(now, feed.manifest());
  const auto cache = folder / "out/model.cache";
  CHECK_THROWS_WITH(save_calibration(cache, kCache, now),
                    Catch::Contains("and a version, got one"));
  now.versions = R"({"tensorrt": "8.6.1"})";
  CHECK(describe_mismatch(cache, now)->find("does not exist yet") != std::string::npos);
  folder.write("out/model.cache", kCache);
  CHECK(describe_mismatch(cache, now)->find("has no fingerprint beside it") != std::string::npos);
  save_calibration(cache, kCache, now);
  CHECK_FALSE(describe_mismatch(cache, now));
  CHECK(read_stored_cache(cache).fingerprint.maker() == "TensorRT 8.6.1 by EntropyCalibration2");
  Fingerprint other = now;
  other.versions = R"({"tensorrt": "10.3.0"})";  // told, not compared
  CHECK_FALSE(describe_mismatch(cache, other));
  other.model.file = std::string(64, 'b');
  other.order = std::string(64, 'c');
  CHECK(describe_mismatch(cache, other) ==
        "the model (weights or graph) changed; the order of the images changed");
  Fingerprint alone;  // without images the model alone is compared
  alone.model = now.model;
  CHECK_FALSE(describe_mismatch(cache, alone));
  folder.write("out/model.cache", kCache + "x: 1\n");
  CHECK(describe_mismatch(cache, now)->find("was changed after model.cache.json was written") !=
        std::string::npos);
  save_calibration(cache, kCache, now);
  folder.write("out/model.cache.json", "{\"schema\": 5");
  CHECK(describe_mismatch(cache, now)->find("is not a fingerprint") != std::string::npos);
  folder.write("out/model.cache.json", std::string(200000, '['));
  CHECK(describe_mismatch(cache, now)->find("is not a fingerprint") != std::string::npos);
}

TEST_CASE("percentiles leave out the slowest, as trtexec does") {
  std::vector<double> ten{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  CHECK(percentile(ten, 90) == 9);
  CHECK(percentile(ten, 99) == 10);
  CHECK(percentile({1.0}, 50) == 1);
  CHECK(Timing::of({3, 1, 2, 4}).median == 2.5);
  CHECK(Timing::of({2, 2, 2}).cv_percent == 0);
  CHECK_THROWS_AS(Timing::of({}), ConfigError);
}
