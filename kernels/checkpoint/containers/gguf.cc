// The rules of the GGUF container.
#include "kernels/checkpoint/containers/gguf.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/containers/gguf_input.h"
#include "kernels/checkpoint/experts.h"

namespace awqd::model {
namespace {

constexpr uint64_t kLeastAlignment = 8, kMostAlignment = 1 << 20, kUsualAlignment = 32;
constexpr uint64_t kMaxArchitectureBytes = 64;

// Bytes that the least of them has in a file: empty names, one-byte values.
constexpr int64_t kLeastKeyBytes = 8 + 4 + 1;
constexpr int64_t kLeastTensorBytes = 8 + 4 + 4 + 8;

// --- Types of tensors ---

constexpr GgufType kTypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 40},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},  {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},    {42, "Q2_0", 64, 18}};

// Two writers use the number of Q2_0: llama.cpp, and PrismML's version of it for blocks of 128.
constexpr absl::string_view kQ2 = "Q2_0";
constexpr GgufType kWideQ2 = {42, "Q2_0_G128", 128, 34};

// Null for a number that is not known.
const GgufType* TypeOf(uint32_t number) {
  for (const GgufType& type : kTypes) {
    if (type.number == number) return &type;
  }
  return nullptr;
}

// --- Metadata ---

struct Header {
  uint64_t tensors = 0;
  uint64_t keys = 0;
  uint64_t alignment = 0;  // 0: not said
  std::optional<std::string> architecture;
  uint16_t part = 0, parts = 1;
};

absl::Status ReadCounts(GgufInput* in, const GgufLimits& limits, Header* out) {
  uint32_t magic = 0, version = 0;
  AWQD_ASSIGN_OR_RETURN(magic, in->Number<uint32_t>("magic"));
  if (magic != 0x46554747) return Invalid("got no \"GGUF\" at its beginning, expected a GGUF file");
  AWQD_ASSIGN_OR_RETURN(version, in->Number<uint32_t>("version"));
  if (version != 2 && version != 3) {
    return Invalid(
        "version: got ", version, ", expected 2 or 3",
        version != 0 && (version & 0xffff) == 0 ? " (big-endian files are not read)" : "");
  }
  AWQD_ASSIGN_OR_RETURN(out->tensors, in->Number<uint64_t>("count of tensors"));
  AWQD_ASSIGN_OR_RETURN(out->keys, in->Number<uint64_t>("count of metadata"));
  const auto most_tensors =
      static_cast<uint64_t>(std::min(limits.max_tensors, in->left() / kLeastTensorBytes));
  if (out->tensors > most_tensors) {
    return Invalid("count of tensors: got ", out->tensors, ", expected at most ", most_tensors);
  }
  const auto most_keys = static_cast<uint64_t>(in->left() / kLeastKeyBytes);
  if (out->keys > most_keys) {
    return Invalid("count of metadata: got ", out->keys, ", expected at most ", most_keys);
  }
  return absl::OkStatus();
}

absl::Status ReadAlignment(GgufInput* in, uint32_t type, Header* out) {
  if (out->alignment != 0) return absl::InvalidArgumentError("occurs twice");
  if (type != kGgufUint32)
    return Invalid("got type ", type, ", expected ", kGgufUint32, " (UINT32)");
  AWQD_ASSIGN_OR_RETURN(out->alignment, in->Number<uint32_t>("value"));
  const uint64_t alignment = out->alignment;
  if (alignment >= kLeastAlignment && alignment <= kMostAlignment &&
      (alignment & (alignment - 1)) == 0) {
    return absl::OkStatus();
  }
  return Invalid("got ", alignment, ", expected a power of two from ", kLeastAlignment, " to ",
                 kMostAlignment);
}

absl::Status ReadArchitecture(GgufInput* in, uint32_t type, Header* out) {
  if (out->architecture) return absl::InvalidArgumentError("occurs twice");
  if (type != kGgufString)
    return Invalid("got type ", type, ", expected ", kGgufString, " (STRING)");
  AWQD_ASSIGN_OR_RETURN(out->architecture, in->Text(kMaxArchitectureBytes, "value"));
  return absl::OkStatus();
}

absl::Status ReadPart(GgufInput* in, uint32_t type, uint16_t* out) {
  if (type != kGgufUint16) return in->SkipValue(type);
  AWQD_ASSIGN_OR_RETURN(*out, in->Number<uint16_t>("value"));
  return absl::OkStatus();
}

absl::Status ReadValue(GgufInput* in, absl::string_view key, uint32_t type, Header* out) {
  if (key == "general.alignment") return ReadAlignment(in, type, out);
  if (key == "general.architecture") return ReadArchitecture(in, type, out);
  if (key == "split.no") return ReadPart(in, type, &out->part);
  if (key == "split.count") return ReadPart(in, type, &out->parts);
  return in->SkipValue(type);
}

// Reads keys until `done`, or all of them.
template <typename Done>
absl::Status ReadMetadata(GgufInput* in, const GgufLimits& limits, Header* out, Done done) {
  for (uint64_t i = 0; i < out->keys && !done(); ++i) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(limits.cancelled));
    AWQD_ASSIGN_OR_RETURN(const std::string key,
                          in->Text(limits.max_key_bytes, absl::StrCat("key ", i)));
    absl::StatusOr<uint32_t> type = in->Number<uint32_t>("type");
    const absl::Status status = type.ok() ? ReadValue(in, key, *type, out) : type.status();
    if (!status.ok()) return Prefixed(absl::StrCat("metadata ", Quoted(key, 64)), status);
  }
  if (IsUtf8(out->architecture.value_or(""))) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "metadata \"general.architecture\": expected UTF-8 without NUL bytes");
}

// --- Tensors ---

// Bytes of the tensor, all of whose dimensions are at least 1; shape[0] varies slowest.
absl::StatusOr<int64_t> BytesOf(const GgufType& type, const std::vector<int64_t>& shape) {
  const std::string text = absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  const int64_t row = shape.empty() ? 1 : shape.back();
  if (row % type.elements != 0) {
    return Invalid("shape: got ", text, ", expected the last a multiple of ", type.elements, " (",
                   type.name, ")");
  }
  std::optional<int64_t> elements = 1;
  for (int64_t dim : shape) {
    if (elements) elements = CheckedMul(*elements, dim);
  }
  const std::optional<int64_t> bytes =
      elements ? CheckedMul(*elements / type.elements, type.bytes) : elements;
  if (!bytes) return Invalid("shape: got ", text, ", which overflows");
  return *bytes;
}

absl::Status ReadTensor(GgufInput* in, const GgufLimits& limits, uint64_t alignment,
                        TensorInfo* out) {
  AWQD_ASSIGN_OR_RETURN(const uint32_t rank, in->Number<uint32_t>("dimensions"));
  if (rank > limits.max_rank) {
    return Invalid("got ", rank, " dimensions, expected at most ", limits.max_rank);
  }
  for (uint32_t i = 0; i < rank; ++i) {
    AWQD_ASSIGN_OR_RETURN(const uint64_t dim, in->Number<uint64_t>("dimension"));
    if (dim < 1 || dim > static_cast<uint64_t>(INT64_MAX)) {
      return Invalid("dimension ", i, ": got ", dim, ", expected 1 to 2^63 - 1");
    }
    out->shape.insert(out->shape.begin(), static_cast<int64_t>(dim));
  }
  AWQD_ASSIGN_OR_RETURN(const uint32_t number, in->Number<uint32_t>("type"));
  AWQD_ASSIGN_OR_RETURN(const uint64_t offset, in->Number<uint64_t>("offset"));
  if (offset > static_cast<uint64_t>(INT64_MAX) || offset % alignment != 0) {
    return Invalid("offset: got ", offset, ", expected a multiple of ", alignment,
                   " (general.alignment) within the file");
  }
  const GgufType* type = TypeOf(number);
  out->dtype = type != nullptr ? std::string(type->name) : absl::StrCat("type ", number);
  out->begin = out->end = static_cast<int64_t>(offset);
  if (type == nullptr) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(*type, out->shape));
  if (__builtin_add_overflow(out->begin, bytes, &out->end)) {
    return Invalid("offset: got ", offset, " and ", bytes, " bytes, which overflow");
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorMap> ReadTensors(GgufInput* in, const GgufLimits& limits, const Header& header,
                                      uint64_t alignment) {
  TensorMap out;
  for (uint64_t i = 0; i < header.tensors; ++i) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(limits.cancelled));
    AWQD_ASSIGN_OR_RETURN(std::string name,
                          in->Text(limits.max_name_bytes, absl::StrCat("name of tensor ", i)));
    if (!IsUtf8(name)) return BadTensor(name, "name: expected UTF-8 without NUL bytes");
    TensorInfo info;
    const absl::Status status = ReadTensor(in, limits, alignment, &info);
    if (!status.ok()) return BadTensor(name, status.message());
    const auto [it, fresh] = out.emplace(std::move(name), std::move(info));
    if (!fresh) return BadTensor(it->first, "occurs twice");
  }
  return out;
}

// Tensors lie within the data, and none over another. There may be holes: padding, mostly.
absl::Status CheckPlaces(const TensorMap& tensors, int64_t data_bytes) {
  int64_t at = 0;
  for (const auto* entry : SortByOffset(tensors)) {
    const auto& [name, tensor] = *entry;
    if (tensor.begin < at) {
      return BadTensor(name, "offset: got ", tensor.begin, ", expected at least ", at,
                       " (overlaps another tensor)");
    }
    if (tensor.end > data_bytes) {
      return BadTensor(name, "got bytes ", tensor.begin, " to ", tensor.end,
                       " of the data, expected at most ", data_bytes, " (truncated?)");
    }
    at = tensor.end;
  }
  return absl::OkStatus();
}

// Makes every tensor of Q2_0 one of blocks of 128. False if there is none, or one that is not.
bool WidenQ2(TensorMap* tensors) {
  bool any = false;
  for (auto& [name, tensor] : *tensors) {
    if (tensor.dtype != kQ2) continue;
    const absl::StatusOr<int64_t> bytes = BytesOf(kWideQ2, tensor.shape);
    if (!bytes.ok()) return false;
    tensor.dtype = std::string(kWideQ2.name);
    tensor.end = tensor.begin + *bytes;
    any = true;
  }
  return any;
}

struct Contents {
  Header header;
  int64_t data_offset = 0;
  TensorMap tensors;
};

absl::StatusOr<Contents> ReadContents(const File& file, const GgufLimits& limits) {
  GgufInput in(&file, limits.max_header_bytes, limits.max_array_depth);
  Contents out;
  AWQD_RETURN_IF_ERROR(ReadCounts(&in, limits, &out.header));
  AWQD_RETURN_IF_ERROR(ReadMetadata(&in, limits, &out.header, [] { return false; }));
  const uint64_t alignment = out.header.alignment == 0 ? kUsualAlignment : out.header.alignment;
  AWQD_ASSIGN_OR_RETURN(out.tensors, ReadTensors(&in, limits, out.header, alignment));
  out.data_offset = RoundUp(in.position(), static_cast<int64_t>(alignment));
  const int64_t data_bytes = std::max<int64_t>(0, file.size() - out.data_offset);
  const absl::Status places = CheckPlaces(out.tensors, data_bytes);
  if (places.ok()) return out;
  // Blocks of 64 take more bytes than those of 128.
  if (!WidenQ2(&out.tensors) || !CheckPlaces(out.tensors, data_bytes).ok()) return places;
  return out;
}

// --- Which tensors are quantised linears ---

constexpr absl::string_view kPlainTypes[] = {"F16", "BF16", "F32", "F64",
                                             "I8",  "I16",  "I32", "I64"};

// Tensors of one type: how many, and the first of them.
struct Some {
  int count = 0;
  absl::string_view first;
};
using ByType = std::map<std::string, Some>;

std::string Listed(const ByType& types, bool with_names) {
  return absl::StrJoin(types, ", ", [&](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.second.count, " of ", entry.first);
    if (with_names) absl::StrAppend(out, " (", Quoted(entry.second.first), ")");
  });
}

// Whether a tensor of blocks is a linear [N, K], or all experts [E, N, K] of one.
bool IsLinear(absl::string_view path, const TensorInfo& tensor) {
  return tensor.shape.size() == 2 || (tensor.shape.size() == 3 && IsPathOfAllExperts(path));
}

}  // namespace

const GgufType* GgufTypeNamed(absl::string_view name) {
  for (const GgufType& type : kTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

absl::StatusOr<GgufFile> OpenGguf(File file, const GgufLimits& limits) {
  AWQD_RETURN_IF_ERROR(file.CheckNoLfsPointer());
  absl::StatusOr<Contents> contents = ReadContents(file, limits);
  if (!contents.ok()) return Prefixed(file.shown_name(), contents.status());
  const Header& header = contents->header;
  return GgufFile{TensorFile(std::move(file), contents->data_offset, std::move(contents->tensors)),
                  header.architecture.value_or(""), header.part, std::max<int>(header.parts, 1)};
}

absl::StatusOr<std::string> ReadGgufArchitecture(const File& file, const GgufLimits& limits) {
  GgufInput in(&file, limits.max_header_bytes, limits.max_array_depth);
  Header header;
  absl::Status status = ReadCounts(&in, limits, &header);
  if (status.ok()) {
    status = ReadMetadata(&in, limits, &header, [&] { return header.architecture.has_value(); });
  }
  if (!status.ok()) return Prefixed(file.shown_name(), status);
  return header.architecture.value_or("");
}

FoundFormat FormatOfGguf(absl::string_view architecture,
                         absl::Span<const TensorMap* const> tensors) {
  FoundFormat out = {.format = &kGgufFormat, .quant_method = std::string(kGgufFormat.quant_method)};
  out.config.rules = {{.targets = {{}}, .settings = {}, .format = &kGgufFormat}};
  ByType plain, unread, other;
  const auto add = [&](absl::string_view name, const TensorInfo& tensor) {
    absl::string_view path = name;
    const bool weight = absl::ConsumeSuffix(&path, ".weight");
    const bool read = absl::c_linear_search(kGgufFormat.code_dtypes, tensor.dtype);
    if (read && weight && IsLinear(path, tensor)) return;
    if (read && weight) {
      out.config.left_out.push_back({ModulePattern::Kind::kPath, std::string(path)});
    }
    ByType& types = read                                               ? other
                    : absl::c_linear_search(kPlainTypes, tensor.dtype) ? plain
                                                                       : unread;
    Some& some = types[tensor.dtype];
    if (some.count++ == 0) some.first = name;
  };
  for (const TensorMap* const file : tensors) {
    for (const auto& [name, tensor] : *file) add(name, tensor);
  }
  std::vector<std::string> parts = {absl::StrCat("GGUF of ", Quoted(architecture))};
  if (!plain.empty()) parts.push_back(absl::StrCat("not quantised: ", Listed(plain, false)));
  if (!unread.empty()) parts.push_back(absl::StrCat("not readable: ", Listed(unread, true)));
  if (!other.empty()) parts.push_back(absl::StrCat("no linears: ", Listed(other, true)));
  out.config.note = absl::StrJoin(parts, "; ");
  return out;
}

}  // namespace awqd::model
