#include "calib8/images.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <system_error>

#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/text.hpp"
#include "scan.hpp"

namespace calib8::images {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 11> kSuffixes{
    ".bmp", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"};
constexpr std::uintmax_t kMaxListBytes = std::uintmax_t{256} << 20U;
constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{1} << 30U;  // of a picture

[[noreturn]] void refuse_list(const fs::path& path) {
  throw FeedError(text::printable(path.string()) +
                  " must be a folder of images, a UTF-8 list of them, an image, an .npy or an"
                  " .npz file, got a file that is none of these; check the path");
}

bool is_hidden(const fs::path& path) { return path.filename().string().front() == '.'; }

bool is_file(const fs::path& path) {
  std::error_code error;
  return path.string().find('\0') == std::string::npos && fs::is_regular_file(path, error);
}

// The accepted files of a folder and its subfolders. Of several paths to a folder, as by links, only the
// first is read.
struct FolderTree {
  bool (*is_accepted_too)(const fs::path&);
  std::set<fs::path> read_folders;
  std::vector<std::string> names;  // relative to the folder

  // `prefix` is the folder's own name, with a slash at its end; empty for that of the tree.
  void read(const fs::path& folder, const std::string& prefix) {
    if (!read_folders.insert(fs::canonical(folder)).second) return;
    std::vector<std::string> subfolders;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      std::error_code failed;  // of a link without an end, which is no folder
      const fs::path name = entry.path().filename();
      if (is_hidden(name)) continue;
      if (entry.is_directory(failed)) {
        subfolders.push_back(name.string());
      } else if (is_image(name) || is_accepted_too(name)) {
        names.push_back(prefix + name.string());
      }
    }
    std::sort(subfolders.begin(), subfolders.end());
    for (const std::string& name : subfolders) read(folder / name, prefix + name + "/");
  }
};

std::vector<std::string> list_names(const fs::path& folder,
                                    bool (*is_accepted_too)(const fs::path&)) {
  FolderTree tree{is_accepted_too, {}, {}};
  try {
    tree.read(folder, "");
  } catch (const fs::filesystem_error& error) {
    throw FeedError("folder " + text::printable(error.path1().string()) +
                    " cannot be read: " + error.code().message() + "; make it readable");
  }
  std::sort(tree.names.begin(), tree.names.end());
  return tree.names;
}

std::string read_list_text(const fs::path& path) {
  std::error_code error;
  if (fs::exists(path, error) && !is_file(path)) refuse_list(path);
  const std::uintmax_t size = fs::file_size(path, error);
  if (!error && size > kMaxListBytes) {
    throw FeedError(text::printable(path.string()) + " is over 256 MB: not a list of images");
  }
  std::string data = files::read(path);
  if (data.rfind("\xEF\xBB\xBF", 0) == 0) data.erase(0, 3);
  if (!text::is_utf8(data) || data.find('\0') != std::string::npos) refuse_list(path);
  return data;
}

Picture parse_line(const fs::path& listing, std::size_t line_number, std::string_view line) {
  const fs::path folder = listing.parent_path();
  const std::string entire_line(line);
  const auto [path_text, last_word] = text::split_last(line);
  if (last_word.empty() || is_file(folder / entire_line))
    return {folder / entire_line, entire_line, std::nullopt};
  const std::string name(path_text);
  if (scan::are_digits(last_word, 1, 9))
    return {folder / name, name, std::stoi(std::string(last_word))};
  if (is_file(folder / name) && !is_file(folder / std::string(last_word))) {
    throw FeedError("a label must be a whole number from 0, got " + text::repr(last_word) +
                    " on line " + std::to_string(line_number) + " of " +
                    text::printable(listing.string()) +
                    "; number the classes in the order of the model's outputs");
  }
  // several files, or one that is missing
  return {folder / entire_line, entire_line, std::nullopt};
}

void check_labels(const fs::path& path, const std::vector<std::size_t>& unlabelled,
                  std::size_t count) {
  if (unlabelled.empty() || unlabelled.size() == count) return;
  throw FeedError("every line of " + text::printable(path.string()) +
                  " or none must have a label, got " + std::to_string(unlabelled.size()) + " of " +
                  std::to_string(count) + " without, the first on line " +
                  std::to_string(unlabelled.front()) + "; add them or remove all labels");
}

}  // namespace

bool is_image(const fs::path& path) {
  const std::string suffix = text::lower(path.extension().string());
  return std::find(kSuffixes.begin(), kSuffixes.end(), suffix) != kSuffixes.end();
}

std::vector<Picture> find(const fs::path& folder, bool (*is_accepted_too)(const fs::path&)) {
  std::vector<Picture> pictures;
  for (std::string& name : list_names(folder, is_accepted_too)) {
    pictures.push_back({folder / name, name, std::nullopt});
  }
  if (!pictures.empty()) return pictures;
  throw FeedError(text::printable(folder.string()) +
                  " must hold images (such as .jpg, .png) or arrays (.npy, .npz, .bin, .raw), got"
                  " none; give another folder or a list file");
}

std::vector<Picture> read_list(const fs::path& path) {
  const std::string data = read_list_text(path);
  std::vector<Picture> pictures;
  std::vector<std::size_t> unlabelled;
  std::string_view remaining_text = data;
  for (std::size_t line_number = 1; !remaining_text.empty(); ++line_number) {
    const std::size_t newline = std::min(remaining_text.find('\n'), remaining_text.size());
    const std::string_view line = text::strip(remaining_text.substr(0, newline));
    remaining_text.remove_prefix(std::min(newline + 1, remaining_text.size()));
    if (line.empty() || line.front() == '#') continue;
    pictures.push_back(parse_line(path, line_number, line));
    if (!pictures.back().label) unlabelled.push_back(line_number);
  }
  if (pictures.empty()) {
    throw FeedError(text::printable(path.string()) +
                    " must list images, got no line; write one path per line");
  }
  check_labels(path, unlabelled, pictures.size());
  return pictures;
}

std::string read(const Picture& picture) {
  std::error_code failed;
  const std::uintmax_t size = is_file(picture.path) ? fs::file_size(picture.path, failed) : 0;
  if (!failed && size > kMaxFileBytes) {
    char got[32];
    std::snprintf(got, sizeof got, "%.1f", static_cast<double>(size) / 0x1p30);
    throw FeedError("image " + text::printable(picture.name) + " must be of at most 1 GB, got " +
                    got + " GB");
  }
  std::string data;
  try {
    data = files::read(picture.path);
  } catch (const FeedError& error) {
    const std::string message = error.what();
    throw FeedError("image " + text::printable(picture.name) +
                    message.substr(message.rfind(" cannot be read: ")));
  }
  if (data.empty()) throw FeedError("image " + text::printable(picture.name) + " is an empty file");
  return data;
}

}  // namespace calib8::images
