// Arrays as a calibration is fed with them; tests/test_cpp_arrays.py compares the samples themselves.
#include <cstring>

#include "calib8/as_read.hpp"
#include "calib8/calibration_job.hpp"
#include "calib8/errors.hpp"
#include "calib8/fingerprint.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

namespace {

// An .npy file, as numpy.save writes it.
template <class Value>
std::string npy(const std::string& descr, const std::string& shape,
                const std::vector<Value>& values) {
  const std::string head =
      "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
  std::string data("\x93NUMPY\x01\0", 8);
  data += {static_cast<char>(head.size()), '\0'};
  return data + head +
         std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
}

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
  std::vector<Tensor> seen;
  std::vector<char> device(100);
  const auto upload = [&](const Tensor& tensor) {
    seen.push_back(tensor);
    return static_cast<void*>(device.data() + seen.size());
  };
  CalibrationJob job(Feed(folder.path(), kSpecs, {}), upload, std::nullopt);
  const char* names[] = {"ids", "x"};
  void* bindings[2] = {};
  REQUIRE(job.next(bindings, names, 2));
  CHECK(bindings[0] == device.data() + 1);
  CHECK(bindings[1] == device.data() + 2);
  CHECK(seen[0].name == "ids");
  CHECK(seen[1].floats()[1] == 2);
  CHECK_THROWS_AS(seen[0].floats(), ConfigError);
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
  Fingerprint made;
  set_feed(made, feed.manifest());
  CHECK(made.preprocess == "{}");
  CHECK(made.decoder == "{}");
}

TEST_CASE("values are read as TensorRT reads them, or refused") {
  // 1, -2, the smallest and the largest number
  const std::vector<char> bytes = as_read(halves({0x3C00, 0xC000, 0x0001, 0x7BFF}), "float16");
  float values[4];
  REQUIRE(bytes.size() == sizeof values);
  std::memcpy(values, bytes.data(), sizeof values);
  CHECK(values[0] == 1);
  CHECK(values[1] == -2);
  CHECK(values[2] == 0x1p-24F);
  CHECK(values[3] == 65504);
  Tensor ids{"ids", "int64", {1}, std::vector<char>(8, '\0')};
  CHECK(as_read(ids, "int32") == std::vector<char>(4, '\0'));
  CHECK(as_read(ids, "int64") == ids.bytes);
  ids.bytes[4] = 1;
  CHECK_THROWS_WITH(as_read(ids, "int32"), Catch::Contains("does not hold 4294967296"));
  CHECK_THROWS_WITH(as_read(ids, "float32"), Catch::Contains("as float32, got int64"));
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
