// Arrays as a calibration is fed with them; tests/test_cpp_arrays.py compares the samples themselves.
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "calib8/binding_values.hpp"
#include "calib8/calibration_job.hpp"
#include "calib8/errors.hpp"
#include "calib8/fingerprint.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

namespace {

const std::vector<TensorSpec> kSpecs{{"x", "float32", {1, 2}}, {"ids", "int64", {1, 1}}};

void fill(const Folder& folder) {
  folder.write("x/a.npy", npy<float>("<f4", "(2, 2)", {1, 2, 3, 4}));
  folder.write("ids/a.npy", npy<std::int64_t>("<i8", "(2, 1)", {7, -8}));
}

Tensor halves(const std::vector<std::uint16_t>& bits) {
  Tensor tensor{"h", "float16", {static_cast<std::int64_t>(bits.size())}, {}};
  tensor.bytes.resize(2 * bits.size());
  std::memcpy(tensor.bytes.data(), bits.data(), tensor.bytes.size());
  return tensor;
}

}  // namespace

TEST_CASE("every input has its address, in the order in which TensorRT asks") {
  const Folder folder;
  fill(folder);
  std::vector<Tensor> calls;
  std::vector<char> device(100);
  const auto upload = [&](const Tensor& tensor) {
    calls.push_back(tensor);
    return static_cast<void*>(device.data() + calls.size());
  };
  CalibrationJob job(Feed(folder.path(), kSpecs, {}), upload, std::nullopt);
  const char* names[] = {"ids", "x"};
  void* bindings[2] = {};
  REQUIRE(job.next(bindings, names, 2));
  CHECK(bindings[0] == device.data() + 1);
  CHECK(bindings[1] == device.data() + 2);
  CHECK(calls[0].name == "ids");
  CHECK(calls[1].floats()[1] == 2);
  CHECK_THROWS_AS(calls[0].floats(), ConfigError);
  REQUIRE(job.next(bindings, names, 2));
  CHECK_FALSE(job.next(bindings, names, 2));
  CalibrationJob other(Feed(folder.path(), kSpecs, {}), upload, std::nullopt);
  CHECK_FALSE(other.next(bindings, names, 1));
  CHECK_THROWS_WITH(other.check(), Catch::Contains("fed, ['x', 'ids'], got ['ids']"));
}

TEST_CASE("a fingerprint of arrays knows no preprocessing and no decoder") {
  const Folder folder;
  fill(folder);
  const Feed feed(folder.path(), kSpecs, {});
  CHECK_FALSE(feed.preprocess());
  Fingerprint array_fingerprint;
  set_feed(array_fingerprint, feed.manifest());
  CHECK(array_fingerprint.preprocess == "{}");
  CHECK(array_fingerprint.decoder == "{}");
}

TEST_CASE("values are read as TensorRT reads them, or refused") {
  // 1, -2, the smallest and the largest number
  const std::vector<char> bytes =
      binding_values(halves({0x3C00, 0xC000, 0x0001, 0x7BFF}), "float16");
  float values[4];
  REQUIRE(bytes.size() == sizeof values);
  std::memcpy(values, bytes.data(), sizeof values);
  CHECK(values[0] == 1);
  CHECK(values[1] == -2);
  CHECK(values[2] == 0x1p-24F);
  CHECK(values[3] == 65504);
  Tensor ids{"ids", "int64", {1}, std::vector<char>(8, '\0')};
  CHECK(binding_values(ids, "int32") == std::vector<char>(4, '\0'));
  CHECK(binding_values(ids, "int64") == ids.bytes);
  ids.bytes[4] = 1;
  CHECK_THROWS_WITH(binding_values(ids, "int32"), Catch::Contains("does not hold 4294967296"));
  CHECK_THROWS_WITH(binding_values(ids, "float32"), Catch::Contains("as float32, got int64"));
}

TEST_CASE("a file that becomes another one while it is read is told") {
  const Folder folder;
  fill(folder);
  folder.write("x/b.npy", npy<float>("<f4", "(1, 2)", {5, 6}));
  folder.write("ids/b.npy", npy<std::int64_t>("<i8", "(1, 1)", {9}));
  const Feed feed(folder.path(), kSpecs, {});
  CHECK(feed.names() == std::vector<std::string>{"sample 0 of a", "sample 1 of a", "b"});
  (void)feed.manifest();
  folder.write("x/b.npy", npy<float>("<f4", "(1, 2)", {5, 7}));
  folder.write("x/a.npy", npy<float>("<f4", "(2, 2)", {1, 2, 3, 4}));
  const auto stream = feed.samples();
  CHECK(stream->next());
  CHECK(stream->next());
  CHECK_THROWS_WITH(stream->next(), Catch::Contains("b changed while calib8 ran"));
}

namespace {

// Gives the samples one after the other, then nothing.
NextSample giving(std::vector<Sample> samples) {
  return [samples = std::move(samples), k = std::size_t{0}]() mutable -> std::optional<Sample> {
    if (k == samples.size()) return std::nullopt;
    return samples[k++];
  };
}

Sample pair(float x, std::int64_t id) {
  const auto* bytes = reinterpret_cast<const char*>(&id);
  return {{"ids", "int64", {1, 1}, {bytes, bytes + sizeof id}}, Tensor::of("x", {1, 2}, {x, 2})};
}

}  // namespace

TEST_CASE("a function's samples are those of the same arrays in files") {
  const Folder folder;
  fill(folder);
  std::vector<Sample> samples;
  const auto files = Feed(folder.path(), kSpecs, {});
  for (const auto stream = files.samples(); auto sample = stream->next();) {
    samples.push_back({(*sample)[1], (*sample)[0]});  // in any order
  }
  const Feed feed(giving(samples), kSpecs, {});
  CHECK(feed.manifest() == files.manifest());
  CHECK(feed.notes() ==
        std::vector<std::string>{"the function was read once into a temporary file (2 samples)"});
  const auto stream = feed.samples();
  for (const Sample& expected : samples) {
    const std::optional<Sample> sample = stream->next();
    REQUIRE(sample);
    CHECK((*sample)[0].bytes == expected[1].bytes);
    CHECK((*sample)[1].bytes == expected[0].bytes);
  }
  CHECK_FALSE(stream->next());
  CHECK(feed.names().back() == "sample 1 of the function");
}

TEST_CASE("a function gives single samples, batches, and what one input is called does not count") {
  const TensorSpec spec{"x", "float32", {"n", 2}};
  const Feed feed(giving({{Tensor::of("x", {2}, {1, 2})},
                          {Tensor::of("y", {3, 2}, {1, 2, 3, 4, 5, 6})},
                          {Tensor::of("", {2, 1, 2}, {7, 8, 9, 10})}}),
                  spec, {});
  CHECK(feed.size() == 6);
  FeedOptions options;
  options.limit = 3;
  options.batch = 2;
  const Feed short_feed(giving({{Tensor::of("x", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8})}}), spec,
                        options);
  CHECK(short_feed.size() == 2);
  CHECK(short_feed.notes()[0] ==
        "the function was read once into a temporary file (the first 3 samples)");
  CHECK(short_feed.whole_batches().size() == 1);
  const auto stream = short_feed.samples();
  const std::optional<Sample> sample = stream->next();
  REQUIRE(sample);
  CHECK(sample->front().shape == std::vector<std::int64_t>{2, 2});
  CHECK(sample->front().floats()[3] == 4);
}

TEST_CASE("what a function gives wrong is told, and what it throws comes out as it is") {
  const auto refused = [](std::vector<Sample> samples, const FeedOptions& options = {}) {
    try {
      const Feed feed(giving(std::move(samples)), kSpecs, options);
      const auto stream = feed.samples();
      while (stream->next()) continue;
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refused({}) == "the function must give samples, got none");
  CHECK_THAT(refused({pair(1, 2), {pair(1, 2)[0]}}),
             Catch::Contains("item 1 of the function must name the inputs ['x', 'ids'], got ['ids']"
                             "; name its arrays as the model does"));
  Sample wrong = pair(1, 2);
  wrong[1].shape = {1, 3};
  CHECK_THAT(refused({wrong}), Catch::Contains("as many bytes as its shape says, got 8"));
  wrong[1] = Tensor::of("x", {1, 3}, {1, 2, 3});
  CHECK_THAT(refused({wrong}), Catch::StartsWith("item 0 of the function must fit the input 'x'"));
  wrong[1].dtype = "int32";
  CHECK_THAT(refused({wrong}), Catch::Contains("must have the dtype of the input 'x' float32"));
  wrong[1] = Tensor::of("x", {0, 2}, {});
  wrong[0] = {"ids", "int64", {0, 1}, {}};
  CHECK(refused({wrong}) == "item 0 of the function must hold samples, got none");
  const std::vector<Sample> bad_feed{pair(1, 2), pair(std::nanf(""), 3), pair(3, 4)};
  CHECK_THAT(refused(bad_feed),
             Catch::StartsWith("sample 1 of the function holds 1 NaN or Inf values for the input"));
  FeedOptions options;
  options.skip_bad = true;
  CHECK(refused(bad_feed, options).empty());
  options.preprocess = Preprocess();
  CHECK_THAT(refused(bad_feed, options), Catch::Contains("are fed as they are, got preprocessing"));
  CHECK_THROWS_AS(Feed(NextSample(), kSpecs, {}), ConfigError);
  const auto throwing = []() -> std::optional<Sample> { throw std::out_of_range("mine"); };
  CHECK_THROWS_AS(Feed(throwing, kSpecs, {}), std::out_of_range);
  const auto endless = []() -> std::optional<Sample> { return pair(1, 2); };
  CHECK_THROWS_WITH(Feed(endless, kSpecs, {}),
                    "the function must end, got 100,001 samples and no end; set a maximum number"
                    " of samples (FeedOptions::limit), and the first ones are used");
  options = {};
  options.limit = 5;
  CHECK(Feed(endless, kSpecs, options).size() == 5);
  options.limit = 0;
  CHECK_THROWS_AS(Feed(endless, kSpecs, options), ConfigError);
}
