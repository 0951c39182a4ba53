// Files of arrays, cut into samples; deploy/feed/arrays.py tells how an array is read against its
// input.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "calib8/images.hpp"
#include "source.hpp"

namespace calib8 {

using Specs = std::vector<TensorSpec>;

// The batch that every input fixes in its first dimension, else 1.
std::int64_t fixed_batch(const Specs& specs);

// Samples in one file. Throws FeedError: it is damaged or does not fit the inputs.
std::unique_ptr<Source> array_file(const std::filesystem::path& path, const Specs& specs);

// Samples in several files, each of all inputs, or in one folder an input; in their order. `title`
// is that of all of it in messages. Throws FeedError: a file that does not fit the inputs; with
// `skip_bad` when it is its turn.
std::unique_ptr<Source> array_files(const std::vector<images::Picture>& files, const Specs& specs,
                                    const std::string& title, bool skip_bad);
std::unique_ptr<Source> array_folder(const std::vector<images::Picture>& files, const Specs& specs,
                                     const std::string& title, bool skip_bad);

// Samples that a function gives, the first `limit` of them, read once into a temporary file. Throws
// FeedError: one that does not fit the inputs, none, or no end of them; and what the function throws.
std::unique_ptr<Source> read_function(const NextSample& next, const Specs& specs,
                                      const std::optional<std::size_t>& limit);

}  // namespace calib8
