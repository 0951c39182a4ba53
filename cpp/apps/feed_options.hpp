// The options that open a feed, shared by the commands.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "calib8/feed.hpp"

namespace calib8::apps {

inline const std::set<std::string> kFeedOptions{"input", "preprocess", "options",
                                                "limit", "threads",    "max-pixels"};
inline constexpr const char* kFeedHelp =
    "  --preprocess NAME     a preset: imagenet, efficientnet-lite, yolo, unit, raw, ...\n"
    "  --options FILE.json   preprocessing as JSON, as Python writes it into its manifest\n"
    "  --limit N             use N images, spread evenly\n"
    "  --threads N           threads that decode (default: one a core, at most 4); batches do not\n"
    "                        depend on it\n"
    "  --max-pixels N        pixels that an image may have (default: 50 million); decoding takes "
    "three\n"
    "                        bytes each\n"
    "  --skip-bad            go on without unreadable images\n";

// Throws ConfigError or FeedError.
FeedOptions feed_options(const Arguments& arguments);
// The inputs by --input NAME:DIMS[:DTYPE], of float32 unless told. Throws ConfigError.
std::vector<TensorSpec> specs_of(const Arguments& arguments);

}  // namespace calib8::apps
