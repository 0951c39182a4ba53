// A calib8 without OpenCV: in place of test_feed.cpp.
#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "calib8/images.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

TEST_CASE("images are refused in one sentence before any is read, and never skipped as bad") {
  const Folder folder;
  folder.write("a.png", "no picture");
  folder.write("list.txt", "a.png 3\n");
  FeedOptions options;
  options.skip_bad = true;
  const std::string told =
      "images are read by OpenCV, which this calib8 was built without; install it (Debian:"
      " libopencv-dev) and build calib8 with -DCALIB8_IMAGES=ON, or feed arrays (.npy) or a"
      " function that gives samples";
  const TensorSpec spec{"image", "float32", {"n", 3, 16, 20}};
  for (const auto& source : {folder.path(), folder / "a.png", folder / "list.txt"}) {
    CHECK_THROWS_WITH(Feed(source, spec, options), told);
  }
  CHECK_THROWS_AS(Feed(folder.path(), spec, options), ConfigError);
  CHECK_THROWS_WITH(images::decode("x", "a.png", false), told);
  CHECK_THROWS_WITH(images::decoder_version(), told);
}
