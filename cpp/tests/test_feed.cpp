#include <sys/stat.h>

#include <chrono>
#include <iterator>
#include <thread>

#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

namespace {

const TensorSpec kSpec{"image", "float32", {"n", 3, 16, 20}};

std::vector<Sample> read_all(const Feed& feed) {
  std::vector<Sample> samples;
  const auto stream = feed.samples();
  while (std::optional<Sample> sample = stream->next()) samples.push_back(std::move(*sample));
  return samples;
}

// Threads of this process.
std::ptrdiff_t running() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

}  // namespace

TEST_CASE("a folder is read recursively, sorted, any case, hidden files passed over") {
  const Folder folder;
  for (const char* name : {"b.png", "a.JPG", "sub/c.bmp", "e f.Png"}) {
    folder.picture(name, 30, 40, 200);
  }
  folder.write(".hidden.png", "x");
  folder.write("notes.md", "x");
  const Feed feed(folder.path(), kSpec, {});
  CHECK(feed.names() == std::vector<std::string>{"a.JPG", "b.png", "e f.Png", "sub/c.bmp"});
  const std::vector<Sample> samples = read_all(feed);
  REQUIRE(samples.size() == 4);
  CHECK(samples[1].front().shape == std::vector<std::int64_t>{1, 3, 16, 20});
  CHECK(samples[1].front().floats()[0] == static_cast<float>(50) * static_cast<float>(1.0 / 255));
  CHECK(read_all(feed)[1].front().bytes == samples[1].front().bytes);
  CHECK_FALSE(feed.labels());
  CHECK(feed.manifest() == Feed(folder.path(), kSpec, {}).manifest());
}

TEST_CASE("a list with labels, and a bad image skipped or told") {
  const Folder folder;
  const std::string data = folder.picture("a b.png", 30, 40, 10);
  folder.write("bad.png", data.substr(0, data.size() - 20));
  folder.write("list.txt", "\xEF\xBB\xBF# c\r\na b.png 3\r\nbad.png 1\r\n");
  const Feed strict(folder / "list.txt", kSpec, {});
  CHECK_THROWS_WITH(read_all(strict), Catch::Contains("image bad.png cannot be decoded") &&
                                          Catch::Contains("skip_bad"));
  FeedOptions options;
  options.skip_bad = true;
  const Feed feed(folder / "list.txt", kSpec, options);
  CHECK(read_all(feed).size() == 1);
  CHECK(feed.labels() == std::vector<int>{3});
  CHECK(feed.size() == 1);
  CHECK(feed.notes().back() == "1 skipped: image bad.png cannot be decoded (" +
                                   std::to_string(data.size() - 20) +
                                   " bytes, damaged or of an unknown format)");
}

TEST_CASE("a fixed batch is filled with the first samples") {
  const Folder folder;
  for (int k = 0; k < 3; ++k) folder.picture(std::to_string(k) + ".png", 16, 20, 10 * k);
  const Feed feed(folder.path(), {"image", "float32", {2, 3, 16, 20}}, {});
  const std::vector<Sample> samples = read_all(feed);
  REQUIRE(samples.size() == 2);
  CHECK(feed.size() == 2);
  CHECK(samples[1].front().shape.front() == 2);
  const std::size_t half = samples[1].front().bytes.size() / sizeof(float) / 2;
  CHECK(samples[1].front().floats()[half] == samples[0].front().floats()[0]);
  CHECK(feed.notes().back().find("filled with the first sample again") != std::string::npos);
  FeedOptions options;
  options.batch = 3;
  CHECK(read_all(Feed(folder.path(), kSpec, options)).size() == 1);
  CHECK_THROWS_AS(Feed(folder.path(), {"image", "float32", {2, 3, 16, 20}}, options), ConfigError);
}

TEST_CASE("max_pixels bounds an image") {
  const Folder folder;
  folder.picture("0.png", 30, 40, 10);
  FeedOptions options;
  options.max_pixels = 1200;
  CHECK(read_all(Feed(folder.path(), kSpec, options)).size() == 1);
  options.max_pixels = 1199;
  CHECK_THROWS_WITH(read_all(Feed(folder.path(), kSpec, options)),
                    Catch::Contains("1,199 pixels, got 40x30"));
  options.max_pixels = 0;
  CHECK_THROWS_AS(Feed(folder.path(), kSpec, options), ConfigError);
}

TEST_CASE("pipes are told and never waited for") {
  const Folder folder;
  REQUIRE(::mkfifo((folder / "pipe.png").c_str(), 0600) == 0);
  REQUIRE(::mkfifo((folder / "list.txt").c_str(), 0600) == 0);
  CHECK_THROWS_WITH(read_all(Feed(folder.path(), kSpec, {})), Catch::Contains("no regular file"));
  CHECK_THROWS_WITH(Feed(folder / "list.txt", kSpec, {}), Catch::Contains("none of these"));
}

TEST_CASE("the manifest is of what was decoded, and a picture that changes is told") {
  const Folder folder;
  for (int k = 0; k < 3; ++k) folder.picture(std::to_string(k) + ".png", 16, 20, 40 * k);
  folder.write("bad.png", "no picture");
  FeedOptions options;
  options.skip_bad = true;
  const Feed before(folder.path(), kSpec, options);
  const std::string manifest = before.manifest();
  const Feed feed(folder.path(), kSpec, options);
  CHECK(read_all(feed).size() == 3);
  for (const char* name : {"1.png", "bad.png"}) std::filesystem::remove(folder / name);
  CHECK(feed.manifest() == manifest);  // nothing is read again
  CHECK(feed.manifest() == manifest);
  folder.picture("1.png", 16, 20, 200);
  for (const Feed& known : {before, feed}) {
    CHECK_THROWS_WITH(read_all(known), Catch::Contains("image 1.png changed while calib8 ran"));
  }
  folder.picture("1.png", 16, 20, 40);
  CHECK(read_all(feed).size() == 3);  // the bad one is known
  CHECK(feed.skipped().size() == 1);
}

TEST_CASE("wrong sources are told") {
  const Folder folder;
  CHECK_THROWS_WITH(Feed(folder / "none", kSpec, {}), Catch::Contains("does not exist"));
  CHECK_THROWS_WITH(Feed(folder.path(), kSpec, {}), Catch::Contains("must hold images"));
  folder.picture("a.png", 4, 4, 0);
  CHECK_THROWS_WITH(Feed(folder.path(), {"x", "int64", {1, 3, 4, 4}}, {}),
                    Catch::Contains("images become float32"));
  folder.write("l.txt", "a.png\ngone.png\n");
  CHECK_THROWS_WITH(Feed(folder / "l.txt", kSpec, {}),
                    Catch::Contains("1 of 2") && Catch::Contains("gone.png"));
  folder.write("bad.png", "x");
  folder.write("l.txt", "bad.png\n");
  FeedOptions options;
  options.skip_bad = true;
  CHECK_THROWS_WITH(read_all(Feed(folder / "l.txt", kSpec, options)),
                    Catch::Contains("all 1 were skipped"));
  options.limit = 0;
  CHECK_THROWS_AS(Feed(folder / "l.txt", kSpec, options), ConfigError);
  options.limit = std::nullopt;
  for (const int threads : {-1, 0, 1025}) {
    options.threads = threads;
    CHECK_THROWS_WITH(
        Feed(folder / "l.txt", kSpec, options),
        Catch::StartsWith("threads must be 1 to 1024, got " + std::to_string(threads)));
  }
}

TEST_CASE("samples, notes and errors do not depend on the number of threads") {
  const Folder folder;
  for (int k = 10; k < 40; ++k) {
    const std::string name = std::to_string(k) + ".png";
    const std::string data = folder.picture(name, k, 60 - k, 6 * k);
    if (k % 6 == 5)
      folder.write(name, data.substr(0, data.size() - 20 - static_cast<std::size_t>(k)));
  }
  FeedOptions options;
  options.batch = 4;
  options.skip_bad = true;
  options.threads = 1;
  const Feed one(folder.path(), kSpec, options);
  const std::vector<Sample> expected = read_all(one);
  for (int round = 0; round < 20; ++round) {
    options.threads = 1 + round % 7;
    const Feed feed(folder.path(), kSpec, options);
    for (int pass = 0; pass < 2; ++pass) {
      const std::vector<Sample> samples = read_all(feed);
      REQUIRE(samples.size() == expected.size());
      for (std::size_t k = 0; k < expected.size(); ++k)
        CHECK(samples[k].front().bytes == expected[k].front().bytes);
      CHECK(feed.notes() == one.notes());
      CHECK(feed.skipped() == one.skipped());
      CHECK(feed.manifest() == one.manifest());
    }
    FeedOptions strict = options;
    strict.skip_bad = false;
    const Feed failing(folder.path(), kSpec, strict);
    CHECK_THROWS_WITH(read_all(failing), Catch::StartsWith("image 11.png cannot be decoded"));
  }
}

TEST_CASE("pictures are decoded by so many threads, and a stream may be left while they do") {
  const Folder folder;
  for (int k = 0; k < 40; ++k) folder.picture(std::to_string(k) + ".png", 16, 20, k);
  FeedOptions options;
  options.threads = 5;
  const Feed feed(folder.path(), kSpec, options);
  {
    const std::ptrdiff_t before = running();
    const auto stream = feed.samples();
    for (int k = 0; k < 10000 && running() < before + 6; ++k) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(running() == before + 6);  // and the one that joins batches
  }
  for (int round = 0; round < 50; ++round) {
    const auto stream = feed.samples();
    for (int k = 0; k < round % 4; ++k) REQUIRE(stream->next());
  }
  CHECK(read_all(feed).size() == 40);
}

TEST_CASE("leaving a stream early, and a feed that goes before its stream") {
  const Folder folder;
  for (int k = 0; k < 20; ++k) folder.picture(std::to_string(k) + ".png", 16, 20, k);
  std::unique_ptr<Stream<Sample>> stream;
  {
    const Feed feed(folder.path(), kSpec, {});
    stream = feed.samples();
  }
  CHECK(stream->next());
}

TEST_CASE("a batch is a number of pictures that can be") {
  const Folder folder;
  folder.picture("a.png", 16, 20, 9);
  for (const std::int64_t batch : {std::int64_t{1} << 33U, std::int64_t{0}, std::int64_t{-1}}) {
    const TensorSpec spec{"image", "float32", {batch, 3, 16, 20}};
    CHECK_THROWS_AS(Feed(folder.path(), spec, {}), ConfigError);
  }
  const std::int64_t large = (std::int64_t{1} << 32U) + 16;
  CHECK_THROWS_WITH(Feed(folder.path(), {"x", "float32", {1, 3, large, 20}}, {}),
                    Catch::Contains("must fit the input"));
}
