// The rules of the safetensors container.
#include "kernels/checkpoint/containers/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/containers/json.h"

namespace awqd::model {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int kMaxDepth = 8;  // a legal header needs 3
constexpr absl::string_view kMetadata = "__metadata__";

// 0 for a dtype that the format does not have.
int BitsOf(absl::string_view dtype) {
  static constexpr std::pair<absl::string_view, int> kDtypes[] = {
      {"BOOL", 8},        {"U8", 8},         {"I8", 8},      {"I16", 16},    {"U16", 16},
      {"F16", 16},        {"BF16", 16},      {"I32", 32},    {"U32", 32},    {"F32", 32},
      {"I64", 64},        {"U64", 64},       {"F64", 64},    {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"F8_E8M0", 8},     {"F4", 4},         {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"C64", 64},
      {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
  for (const auto& [name, bits] : kDtypes) {
    if (name == dtype) return bits;
  }
  return 0;
}

// shape x dtype must be whole bytes and exactly what the offsets span.
absl::Status CheckSize(absl::string_view name, const TensorInfo& tensor) {
  const int bits_each = BitsOf(tensor.dtype);
  if (bits_each == 0) {
    return BadTensor(name, "dtype: got ", Quoted(tensor.dtype, 32),
                     ", expected one of the safetensors format");
  }
  std::optional<int64_t> elements = 1;
  for (int64_t dim : tensor.shape) {
    if (elements) elements = CheckedMul(*elements, dim);
  }
  const std::string shape = absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]");
  const std::optional<int64_t> bits = elements ? CheckedMul(*elements, bits_each) : elements;
  if (!bits) return BadTensor(name, "shape: got ", shape, ", which overflows");
  if (*bits % 8 != 0) {
    return BadTensor(name, "shape: got ", shape, " of ", tensor.dtype,
                     ", expected a whole number of bytes");
  }
  if (tensor.end < tensor.begin || tensor.bytes() != *bits / 8) {
    return BadTensor(name, "data_offsets: got [", tensor.begin, ", ", tensor.end, "], expected ",
                     *bits / 8, " bytes for ", tensor.dtype, " ", shape);
  }
  return absl::OkStatus();
}

// In order of their offsets, tensors must follow one another from byte 0 to the end of the file.
absl::Status CheckCover(const TensorMap& tensors, int64_t data_bytes) {
  int64_t at = 0;
  for (const auto* entry : SortByOffset(tensors)) {
    const auto& [name, tensor] = *entry;
    if (tensor.begin != at) {
      return BadTensor(
          name, "data_offsets: got begin ", tensor.begin, ", expected ", at,
          tensor.begin < at ? " (overlaps another tensor)" : " (leaves a hole before it)");
    }
    if (tensor.end > data_bytes) {
      return BadTensor(name, "data_offsets: got end ", tensor.end, ", expected at most ",
                       data_bytes, ", the bytes after the header (truncated?)");
    }
    at = tensor.end;
  }
  if (at == data_bytes) return absl::OkStatus();
  return Invalid("tensors cover ", at, " of ", data_bytes,
                 " bytes after the header, expected all of them");
}

// Builds the map while the header is parsed, so that no document of it is ever in memory.
class HeaderEvents final : public JsonEvents {
 public:
  explicit HeaderEvents(const SafetensorsLimits& limits)
      : JsonEvents(kMaxDepth, limits.cancelled), limits_(limits) {}

  TensorMap ReleaseTensors() { return std::move(tensors_); }
  FileMetadata ReleaseMetadata() { return std::move(metadata_); }

  absl::Status StartObject() override {
    if (where_ == Where::kOutside) {
      where_ = Where::kRoot;
      return absl::OkStatus();
    }
    if (where_ != Where::kRoot) return Unexpected("an object");
    where_ = name_ == kMetadata ? Where::kMetadata : Where::kTensor;
    tensor_ = {};
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return absl::OkStatus();
  }

  absl::StatusOr<bool> IsNewKey(const std::string& key) override {
    if (where_ != Where::kRoot) return JsonEvents::IsNewKey(key);
    if (key == kMetadata) return !std::exchange(has_metadata_, true);
    return !tensors_.contains(key);
  }

  absl::Status Key(absl::string_view key) override {
    if (where_ == Where::kRoot) return StartTensor(key);
    if (where_ == Where::kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      return BadTensor(name_, "got key ", Quoted(key, 64),
                       ", expected dtype, shape or data_offsets");
    }
    field_ = std::string(key);
    return absl::OkStatus();
  }

  absl::Status EndObject() override {
    if (where_ == Where::kRoot) {
      where_ = Where::kOutside;
      return absl::OkStatus();
    }
    const bool tensor = where_ == Where::kTensor;
    where_ = Where::kRoot;
    return tensor ? FinishTensor() : absl::OkStatus();
  }

  absl::Status StartArray() override {
    if (where_ != Where::kTensor || field_ == "dtype") return Unexpected("an array");
    where_ = Where::kNumbers;
    numbers_.clear();
    return absl::OkStatus();
  }

  absl::Status EndArray() override {
    where_ = Where::kTensor;
    if (field_ == "shape") {
      tensor_.shape = numbers_;
      has_shape_ = true;
      return absl::OkStatus();
    }
    if (numbers_.size() != 2) {
      return BadTensor(name_, "data_offsets: got ", numbers_.size(), " numbers, expected 2");
    }
    tensor_.begin = numbers_[0];
    tensor_.end = numbers_[1];
    has_offsets_ = true;
    return absl::OkStatus();
  }

  absl::Status Scalar(const uint64_t* number, const std::string* text) override {
    if (where_ == Where::kNumbers) return Number(number);
    if (where_ == Where::kMetadata && text != nullptr) {
      metadata_.emplace(field_, *text);
      return absl::OkStatus();
    }
    if (where_ != Where::kTensor || field_ != "dtype" || text == nullptr) {
      return Unexpected("a plain value");
    }
    tensor_.dtype = *text;
    has_dtype_ = true;
    return absl::OkStatus();
  }

 private:
  enum class Where { kOutside, kRoot, kMetadata, kTensor, kNumbers };

  absl::Status Unexpected(absl::string_view got) const {
    if (where_ == Where::kMetadata) {
      return Invalid("__metadata__: key ", Quoted(field_, 64), ": got ", got,
                     ", expected a string");
    }
    if (where_ == Where::kTensor || where_ == Where::kNumbers) {
      return BadTensor(name_, field_, ": got ", got, ", expected ",
                       field_ == "dtype" ? "a string" : "an array of whole numbers");
    }
    return BadTensor(name_, "got ", got, ", expected an object");
  }

  absl::Status StartTensor(absl::string_view name) {
    if (name.size() > limits_.max_name_bytes) {
      return BadTensor(name, "name: got ", name.size(), " bytes, expected at most ",
                       limits_.max_name_bytes);
    }
    if (static_cast<int64_t>(tensors_.size()) >= limits_.max_tensors) {
      return Invalid("got more than ", limits_.max_tensors, " tensors, the limit",
                     limits_.max_tensors < SafetensorsLimits().max_tensors
                         ? " beside those of the model's other files"
                         : "");
    }
    name_ = std::string(name);
    field_.clear();
    return absl::OkStatus();
  }

  absl::Status Number(const uint64_t* number) {
    if (number == nullptr || *number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return BadTensor(name_, field_, ": expected whole numbers from 0 to 2^63 - 1");
    }
    if (numbers_.size() == limits_.max_rank) {
      return BadTensor(name_, field_, ": got more than ", limits_.max_rank, " numbers, the limit");
    }
    numbers_.push_back(static_cast<int64_t>(*number));
    return absl::OkStatus();
  }

  absl::Status FinishTensor() {
    if (!has_dtype_ || !has_shape_ || !has_offsets_) {
      return BadTensor(name_, "got no ",
                       !has_dtype_   ? "dtype"
                       : !has_shape_ ? "shape"
                                     : "data_offsets");
    }
    AWQD_RETURN_IF_ERROR(CheckSize(name_, tensor_));
    tensors_.emplace(std::move(name_), std::move(tensor_));
    return absl::OkStatus();
  }

  const SafetensorsLimits& limits_;
  TensorMap tensors_;
  FileMetadata metadata_;
  Where where_ = Where::kOutside;
  std::string name_;
  std::string field_;
  TensorInfo tensor_;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::vector<int64_t> numbers_;
};

absl::StatusOr<std::string> ReadHeader(const File& file, const SafetensorsLimits& limits) {
  uint8_t raw[kLengthBytes];
  if (file.size() < kLengthBytes) {
    return Invalid(file.shown_name(), ": got ", file.size(),
                   " bytes, expected at least 8 (safetensors)");
  }
  AWQD_RETURN_IF_ERROR(file.ReadAt(0, absl::MakeSpan(raw)));
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | raw[i];
  const int64_t most = std::min(limits.max_header_bytes, file.size() - kLengthBytes);
  if (length > static_cast<uint64_t>(most)) {
    return Invalid(file.shown_name(), ": header length: got ", length, " bytes, expected at most ",
                   most,
                   most < limits.max_header_bytes ? " (the rest of the file; truncated?)"
                   : most < SafetensorsLimits().max_header_bytes
                       ? absl::StrCat(" (the headers of a model may have ",
                                      SafetensorsLimits().max_header_bytes, " in all)")
                       : "");
  }
  std::string header(length, '\0');
  AWQD_RETURN_IF_ERROR(file.ReadAt(
      kLengthBytes, absl::MakeSpan(reinterpret_cast<uint8_t*>(header.data()), header.size()),
      limits.cancelled));
  return header;
}

}  // namespace

absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view header, int64_t data_bytes,
                                                 const SafetensorsLimits& limits,
                                                 FileMetadata* metadata) {
  if (header.empty() || header.front() != '{') {
    return absl::InvalidArgumentError("header: expected it to begin with '{'");
  }
  while (header.back() == ' ') header.remove_suffix(1);  // the padding that writers may add
  if (header.back() != '}') {
    return absl::InvalidArgumentError("header: expected it to end with '}' and spaces only");
  }
  HeaderEvents events(limits);
  if (absl::Status status = ParseJson(header, &events); !status.ok()) {
    return Prefixed("header", status);
  }
  TensorMap tensors = events.ReleaseTensors();
  AWQD_RETURN_IF_ERROR(CheckCover(tensors, data_bytes));
  if (metadata != nullptr) *metadata = events.ReleaseMetadata();
  return tensors;
}

absl::StatusOr<TensorFile> OpenSafetensors(File file, const SafetensorsLimits& limits) {
  AWQD_RETURN_IF_ERROR(CheckCancelled(limits.cancelled));
  AWQD_RETURN_IF_ERROR(file.CheckNoLfsPointer());
  AWQD_ASSIGN_OR_RETURN(const std::string header, ReadHeader(file, limits));
  const int64_t data_offset = kLengthBytes + static_cast<int64_t>(header.size());
  FileMetadata metadata;
  absl::StatusOr<TensorMap> tensors =
      ParseSafetensorsHeader(header, file.size() - data_offset, limits, &metadata);
  if (!tensors.ok()) return Prefixed(file.shown_name(), tensors.status());
  return TensorFile(std::move(file), data_offset, *std::move(tensors), std::move(metadata));
}

}  // namespace awqd::model
