// A small strict reader of .npy headers: one fixed grammar, no Python expressions.
#include "client/files/npy.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/half.h"
#include "kernels/base/status.h"

namespace awqd::client {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
// Version 1 cannot state more, and an honest header of eight dimensions takes a few hundred bytes.
constexpr size_t kMaxHeaderBytes = 65535;

struct TypeRow {
  NpyType type;
  absl::string_view descr;
  int64_t size;
  DType dtype;  // DTYPE_UNSPECIFIED: no request carries it
};
// In the order of NpyType.
constexpr TypeRow kTypes[] = {{NpyType::kF2, "<f2", 2, v1::FP16},
                              {NpyType::kF4, "<f4", 4, v1::FP32},
                              {NpyType::kF8, "<f8", 8, v1::DTYPE_UNSPECIFIED},
                              {NpyType::kI4, "<i4", 4, v1::INT32},
                              {NpyType::kI1, "|i1", 1, v1::INT8},
                              {NpyType::kU1, "|u1", 1, v1::UINT8}};

const TypeRow& RowOf(NpyType type) { return kTypes[static_cast<size_t>(type)]; }

absl::Status Bad(absl::string_view got, absl::string_view expected) {
  // A hostile header must not flood the terminal.
  return Invalid("npy header: got '", absl::CHexEscape(got.substr(0, 80)), "', expected ",
                 expected);
}

// Consumes the dictionary literal from the front of `text_`.
class DictParser {
 public:
  explicit DictParser(absl::string_view text) : text_(text) {}

  absl::StatusOr<NpyHeader> Parse() {
    if (!ConsumeToken("{")) return Bad(text_, "'{'");
    for (bool comma = true; !ConsumeToken("}"); comma = ConsumeToken(",")) {
      if (!comma) return Bad(text_, "',' or '}'");
      AWQD_RETURN_IF_ERROR(ParseEntry());
    }
    Space();
    if (!text_.empty()) return Bad(text_, "nothing after the dictionary");
    if (!type_ || !ordered_ || !shape_) return Bad("", "'descr', 'fortran_order' and 'shape'");
    NpyHeader header{*type_, *std::move(shape_)};
    AWQD_ASSIGN_OR_RETURN(const int64_t count, ElementCount(header.shape));
    if (__builtin_mul_overflow(count, SizeOf(header.type), &header.data_bytes)) {
      return Bad(ShapeString(header.shape), "fewer than 2^63 bytes");
    }
    return header;
  }

 private:
  void Space() { text_.remove_prefix(std::min(text_.find_first_not_of(" \n"), text_.size())); }
  bool ConsumeToken(absl::string_view token) {
    Space();
    return absl::ConsumePrefix(&text_, token);
  }

  absl::StatusOr<absl::string_view> String() {
    Space();
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return Bad(text_, "a string");
    const size_t end = text_.find(text_[0], 1);
    if (end == absl::string_view::npos) return Bad(text_, "a closing quote");
    const absl::string_view value = text_.substr(1, end - 1);
    text_.remove_prefix(end + 1);
    return value;
  }

  absl::Status ParseEntry() {
    AWQD_ASSIGN_OR_RETURN(const absl::string_view key, String());
    if (!ConsumeToken(":")) return Bad(text_, "':'");
    if (key == "descr" && !type_) return ParseDescr();
    if (key == "fortran_order" && !ordered_) return ParseOrder();
    if (key == "shape" && !shape_) return ParseShape();
    return Bad(key, "'descr', 'fortran_order' and 'shape', each once");
  }

  absl::Status ParseDescr() {
    const absl::StatusOr<absl::string_view> descr = String();
    if (!descr.ok()) return descr.status();
    for (const TypeRow& row : kTypes) {
      if (row.descr == *descr) {
        type_ = row.type;
        return absl::OkStatus();
      }
    }
    return Bad(*descr, "descr <f2, <f4, <f8, <i4, |i1 or |u1");
  }

  absl::Status ParseOrder() {
    if (ConsumeToken("True")) {
      return Bad("fortran_order: True", "C order (numpy.ascontiguousarray makes it)");
    }
    if (!ConsumeToken("False")) return Bad(text_, "False");
    ordered_ = true;
    return absl::OkStatus();
  }

  absl::Status ParseShape() {
    if (!ConsumeToken("(")) return Bad(text_, "'('");
    std::vector<int64_t> shape;
    bool comma = true;
    while (!ConsumeToken(")")) {
      if (!comma) return Bad(text_, "',' or ')'");
      Space();
      const size_t digits = std::min(text_.find_first_not_of("0123456789"), text_.size());
      int64_t dim = 0;
      if (!absl::SimpleAtoi(text_.substr(0, digits), &dim)) return Bad(text_, "a dimension");
      text_.remove_prefix(digits);
      shape.push_back(dim);
      if (shape.size() > 8) return Bad("rank 9 or more", "at most 8 dimensions");
      comma = ConsumeToken(",");
    }
    // "(3)" is a number in Python, "(3,)" a tuple; NumPy writes only the latter.
    if (shape.size() == 1 && !comma) return Bad("shape (n)", "shape (n,)");
    shape_ = std::move(shape);
    return absl::OkStatus();
  }

  absl::string_view text_;
  std::optional<NpyType> type_;
  bool ordered_ = false;  // fortran_order was read
  std::optional<std::vector<int64_t>> shape_;
};

// False when there is no memory for `size` bytes. More than the machine has is refused before it is
// asked for: a system that promises any amount would end the process once it is touched.
bool Allocate(int64_t size, std::string& bytes) try {
  if (size / sysconf(_SC_PAGESIZE) > sysconf(_SC_PHYS_PAGES)) return false;
  bytes.resize(static_cast<size_t>(size));
  return true;
} catch (const std::exception&) {
  return false;
}

}  // namespace

int64_t SizeOf(NpyType type) { return RowOf(type).size; }
absl::string_view Descr(NpyType type) { return RowOf(type).descr; }

absl::StatusOr<NpyHeader> ParseNpyHeader(absl::string_view start) {
  if (!absl::StartsWith(start, kMagic)) return Bad(start.substr(0, 6), "'\\x93NUMPY'");
  if (start.size() < 12) return Bad(absl::StrCat(start.size(), " bytes"), "at least 12");
  const auto byte = [start](size_t i) { return static_cast<uint8_t>(start[i]); };
  const int major = byte(6);
  if ((major != 1 && major != 2) || byte(7) != 0) {
    return Bad(absl::StrCat("version ", major, ".", byte(7)), "version 1.0 or 2.0");
  }
  const size_t prefix = major == 1 ? 10 : 12;
  size_t length = byte(8) | byte(9) << 8;
  if (major == 2)
    length |= static_cast<size_t>(byte(10)) << 16 | static_cast<size_t>(byte(11)) << 24;
  if (length > kMaxHeaderBytes) {
    return Bad(absl::StrCat("a length of ", length), absl::StrCat("at most ", kMaxHeaderBytes));
  }
  if (start.size() < prefix + length) {
    return Bad(absl::StrCat(start.size(), " bytes of file"),
               absl::StrCat(prefix + length, " bytes for the header alone"));
  }
  absl::StatusOr<NpyHeader> header = DictParser(start.substr(prefix, length)).Parse();
  if (header.ok()) header->data_offset = static_cast<int64_t>(prefix + length);
  return header;
}

std::string MakeNpyHeader(NpyType type, const std::vector<int64_t>& shape) {
  std::string dims;
  for (const int64_t dim : shape) absl::StrAppend(&dims, dim, shape.size() == 1 ? "," : ", ");
  if (shape.size() > 1) dims.resize(dims.size() - 2);
  std::string dict = absl::StrCat("{'descr': '", Descr(type),
                                  "', 'fortran_order': False, 'shape': (", dims, "), }");
  const size_t total = (10 + dict.size() + 1 + 63) / 64 * 64;
  dict.resize(total - 10 - 1, ' ');
  dict.push_back('\n');
  const char length[2] = {static_cast<char>(dict.size() & 0xff),
                          static_cast<char>(dict.size() >> 8)};
  return absl::StrCat(kMagic, absl::string_view("\x01\x00", 2), absl::string_view(length, 2), dict);
}

absl::StatusOr<NpyArray> ReadNpy(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  // A FIFO or a device would block or never end.
  if (!S_ISREG(info.st_mode)) return Invalid(path, ": not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::PermissionDeniedError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::string start(12 + kMaxHeaderBytes, '\0');
  file.read(start.data(), static_cast<std::streamsize>(start.size()));
  start.resize(static_cast<size_t>(file.gcount()));
  absl::StatusOr<NpyHeader> header = ParseNpyHeader(start);
  if (!header.ok()) return Prefixed(path, header.status());
  const int64_t actual = info.st_size - header->data_offset;
  if (actual != header->data_bytes) {
    return Invalid(path, ": got ", actual, " bytes of data for ", Descr(header->type), " ",
                   ShapeString(header->shape), ", expected ", header->data_bytes);
  }
  NpyArray array{header->type, std::move(header->shape), ""};
  if (!Allocate(actual, array.bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, ": got ", actual, " bytes of data, expected at most what memory holds"));
  }
  file.clear();
  file.seekg(header->data_offset);
  if (!file.read(array.bytes.data(), actual)) {
    return absl::DataLossError(path + ": became shorter while it was read");
  }
  return array;
}

double NpyArray::ValueAt(size_t i) const {
  const auto read = [this, i](auto zero) {
    std::memcpy(&zero, bytes.data() + i * sizeof(zero), sizeof(zero));
    return zero;
  };
  switch (type) {
    case NpyType::kF2:
      return HalfToFloat(read(uint16_t{0}));
    case NpyType::kF4:
      return read(0.0f);
    case NpyType::kF8:
      return read(0.0);
    case NpyType::kI4:
      return read(int32_t{0});
    case NpyType::kI1:
      return read(int8_t{0});
    case NpyType::kU1:
      return read(uint8_t{0});
  }
  return 0;
}

std::vector<double> NpyArray::ToDoubles() const {
  std::vector<double> values(bytes.size() / static_cast<size_t>(SizeOf(type)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = ValueAt(i);
  return values;
}

absl::StatusOr<Tensor> ToTensor(NpyArray array) {
  const DType dtype = RowOf(array.type).dtype;
  if (dtype == v1::DTYPE_UNSPECIFIED) {
    return Invalid("npy: got ", Descr(array.type),
                   ", which no request carries; save it as float32");
  }
  return Tensor{dtype, std::move(array.shape), std::move(array.bytes)};
}

absl::StatusOr<NpyType> NpyTypeOf(DType dtype) {
  for (const TypeRow& row : kTypes) {
    if (row.dtype == dtype && dtype != v1::DTYPE_UNSPECIFIED) return row.type;
  }
  return Invalid("npy: NumPy has no type for ", Name(dtype),
                 "; write .safetensors, or ask for FP32");
}

}  // namespace awqd::client
