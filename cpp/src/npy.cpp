#include "npy.hpp"

#include <array>
#include <cctype>
#include <optional>

#include "bytes.hpp"

namespace calib8::npy {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

struct DtypeCode {
  std::string_view code;
  std::string_view name;
};

constexpr std::array<DtypeCode, 12> kDtypes{{{"f2", "float16"},
                                             {"f4", "float32"},
                                             {"f8", "float64"},
                                             {"i1", "int8"},
                                             {"i2", "int16"},
                                             {"i4", "int32"},
                                             {"i8", "int64"},
                                             {"u1", "uint8"},
                                             {"u2", "uint16"},
                                             {"u4", "uint32"},
                                             {"u8", "uint64"},
                                             {"b1", "bool"}}};

// The Python literal of a header: a dict of a string, a bool and a tuple of whole numbers.
class Literal {
 public:
  explicit Literal(std::string_view text) : text_(text) {}

  bool accept(char character) {
    skip_space();
    if (text_.empty() || text_.front() != character) return false;
    text_.remove_prefix(1);
    return true;
  }

  void expect(char character) {
    if (!accept(character)) throw Broken("its header is damaged");
  }

  std::string string() {
    skip_space();
    const char quote = text_.empty() ? '\0' : text_.front();
    const std::size_t end = text_.find(quote, 1);
    if ((quote != '\'' && quote != '"') || end == std::string_view::npos) {
      throw Broken("its header is damaged, or tells of records");
    }
    const std::string value(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return value;
  }

  bool boolean() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    throw Broken("its header is damaged");
  }

  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> values;
    expect('(');
    bool has_comma = true;
    while (!accept(')')) {
      if (!has_comma) throw Broken("its header is damaged");
      values.push_back(number());
      has_comma = accept(',');
    }
    if (values.size() == 1 && !has_comma)
      throw Broken("its header is damaged");  // "(3)" is a number
    return values;
  }

  bool at_end() {
    skip_space();
    return text_.empty();
  }

 private:
  void skip_space() {
    while (!text_.empty() && (text_.front() == ' ' || text_.front() == '\n')) {
      text_.remove_prefix(1);
    }
  }

  bool accept_word(std::string_view expected) {
    skip_space();
    if (text_.substr(0, expected.size()) != expected) return false;
    text_.remove_prefix(expected.size());
    return true;
  }

  std::int64_t number() {
    skip_space();
    std::size_t digits = 0;
    std::int64_t value = 0;
    while (digits < text_.size() && text_[digits] >= '0' && text_[digits] <= '9') {
      if (++digits > 18) throw Broken("its header claims more than is there");
      value = value * 10 + (text_[digits - 1] - '0');
    }
    const bool leading_zero = digits > 1 && text_.front() == '0';
    if (digits == 0 || leading_zero) throw Broken("its header is damaged, or a side is negative");
    text_.remove_prefix(digits);
    (void)accept_word("L");  // as Python 2 wrote it
    return value;
  }

  std::string_view text_;
};

void set_dtype(Header& header, const std::string& descr) {
  if (descr.find('O') != std::string::npos) throw Broken("it holds Python objects");
  const bool has_byte_order =
      !descr.empty() && std::string_view("<>|=").find(descr[0]) != std::string::npos;
  const std::string code = has_byte_order ? descr.substr(1) : descr;
  header.dtype = descr;
  for (const DtypeCode& dtype_code : kDtypes) {
    if (dtype_code.code != code) continue;
    header.dtype = dtype_code.name;
    header.kind = code[0];
    header.item = static_cast<std::size_t>(code[1] - '0');
    header.swapped = has_byte_order && descr[0] == '>' && header.item > 1;
  }
}

// Throws Broken where the values would reach beyond `room` bytes.
void set_bytes(Header& header, std::uint64_t available_bytes) {
  std::uint64_t total_bytes = header.kind == 0 ? 0 : header.item;
  for (const std::int64_t side : header.shape) {
    const auto count = static_cast<std::uint64_t>(side);
    if (count == 0) {
      header.bytes = 0;
      return;
    }
    if (total_bytes > (UINT64_MAX >> 1U) / count)
      throw Broken("its header claims more than is there");
    total_bytes *= count;
  }
  if (total_bytes > available_bytes) {
    throw Broken("its header claims " + header.describe() + ", which is more than is there");
  }
  header.bytes = total_bytes;
}

std::string_view header_text(std::string_view head, Header& header) {
  try {
    const std::uint64_t major = bytes::little(head, 6, 1);
    if (major < 1 || major > 3 || bytes::little(head, 7, 1) != 0) {
      throw Broken("its format is not of version 1, 2 or 3");
    }
    const std::size_t width = major == 1 ? 2 : 4;
    const std::uint64_t length = bytes::little(head, 8, width);
    if (length > kMaxHeaderBytes - 12) throw Broken("its header is too long");
    header.values_at = 8 + width + length;
    if (header.values_at > head.size()) throw Broken("its header is cut short");
    return head.substr(8 + width, length);
  } catch (const bytes::CutShort&) {
    throw Broken("its header is cut short");
  }
}

}  // namespace

Header parse(std::string_view head, std::uint64_t size) {
  if (head.empty()) throw Broken("it is empty");
  if (head.substr(0, 4) == "PK\x03\x04") throw Broken("it is an .npz archive under the name .npy");
  if (head.substr(0, kMagic.size()) != kMagic) throw Broken("it does not begin as numpy's files");
  Header header;
  Literal literal(header_text(head, header));
  std::optional<std::string> descr;
  std::optional<bool> fortran;
  std::optional<std::vector<std::int64_t>> shape;
  literal.expect('{');
  bool has_comma = true;
  while (!literal.accept('}')) {
    if (!has_comma) throw Broken("its header is damaged");
    const std::string key = literal.string();
    literal.expect(':');
    if (key == "descr" && !descr) {
      descr = literal.string();
    } else if (key == "fortran_order" && !fortran) {
      fortran = literal.boolean();
    } else if (key == "shape" && !shape) {
      shape = literal.tuple();
    } else {
      throw Broken("its header is damaged");
    }
    has_comma = literal.accept(',');
  }
  if (!descr || !fortran || !shape || !literal.at_end()) throw Broken("its header is damaged");
  set_dtype(header, *descr);
  header.fortran = *fortran;
  header.shape = *shape;
  set_bytes(header, size > header.values_at ? size - header.values_at : 0);
  return header;
}

Header make_header(const std::string& dtype, const std::vector<std::int64_t>& shape,
                   std::uint64_t size) {
  Header header;
  set_dtype(header, descr_of(dtype));
  header.shape = shape;
  set_bytes(header, size);
  return header;
}

std::string Header::describe() const {
  if (!swapped) return dtype + " " + format_shape(shape);
  return ">" + descr_of(dtype).substr(1) + " " + format_shape(shape);
}

std::string descr_of(const std::string& dtype) {
  for (const DtypeCode& dtype_code : kDtypes) {
    if (dtype_code.name == dtype) {
      return (dtype_code.code[1] == '1' ? "|" : "<") + std::string(dtype_code.code);
    }
  }
  return dtype;
}

std::string format_shape(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t side : shape) text += (text.empty() ? "" : ", ") + std::to_string(side);
  return "[" + text + "]";
}

}  // namespace calib8::npy
