// The container, the other way around than checkpoint/safetensors.
#include "client/tools/safetensors_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int64_t kPart = 8 << 20;
constexpr int64_t kAlign = 8;
constexpr int64_t kPrefix = 8;  // the header's length
// Of one tensor beside its name: dtype, at most 8 dimensions, two offsets, and punctuation.
constexpr int64_t kEntry = 320;
constexpr int64_t kFrame = 64;  // braces and metadata

std::string Dump(const nlohmann::ordered_json& json) {
  // `replace`: a name that is not UTF-8 must not throw; a checked checkpoint has none.
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Of types that are a byte or more.
int64_t ElementBytes(const NewTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t dim : tensor.shape) elements *= dim;
  return elements == 0 ? 1 : tensor.bytes / elements;
}

}  // namespace

int64_t SafetensorsWriter::HeaderBytes(absl::string_view name) {
  return static_cast<int64_t>(Dump(std::string(name)).size()) + kEntry;
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, int64_t header_bytes) {
  header_bytes = RoundUp(header_bytes + kFrame, kAlign);
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<OutputFile> file, OutputFile::Create(path));
  AWQD_RETURN_IF_ERROR(file->Append(std::string(kPrefix + header_bytes, ' ')));
  std::unique_ptr<SafetensorsWriter> out(
      new SafetensorsWriter(path, std::move(file), header_bytes));
  out->header_["__metadata__"] = {{"format", "pt"}};  // which transformers asks for
  return out;
}

absl::Status SafetensorsWriter::Add(NewTensor tensor) {
  if (tensor.bytes % kAlign == 0) return Write(tensor);
  last_.push_back(std::move(tensor));
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Write(const NewTensor& tensor) {
  int64_t step = std::max(tensor.unit, kPart / tensor.unit * tensor.unit);
  // Dense weights are read eight columns at a time.
  if (step >= 8 * tensor.unit) step = step / (8 * tensor.unit) * (8 * tensor.unit);
  part_.resize(std::min(step, tensor.bytes));
  for (int64_t at = 0; at < tensor.bytes; at += step) {
    const auto part = absl::MakeSpan(part_).first(std::min(step, tensor.bytes - at));
    AWQD_RETURN_IF_ERROR(tensor.read(at, part));
    AWQD_RETURN_IF_ERROR(file_->Append(absl::Span<const uint8_t>(part)));
  }
  header_[tensor.name] = {{"dtype", tensor.dtype},
                          {"shape", tensor.shape},
                          {"data_offsets", {data_bytes_, data_bytes_ + tensor.bytes}}};
  data_bytes_ += tensor.bytes;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  absl::c_stable_sort(last_, [](const NewTensor& a, const NewTensor& b) {
    return ElementBytes(a) > ElementBytes(b);
  });
  for (const NewTensor& tensor : last_) AWQD_RETURN_IF_ERROR(Write(tensor));
  last_.clear();
  const std::string text = Dump(header_);
  if (static_cast<int64_t>(text.size()) > header_bytes_) {
    return absl::InternalError(absl::StrCat(path_, ": the header takes ", text.size(), " bytes, ",
                                            header_bytes_, " were kept for it"));
  }
  const auto length = static_cast<uint64_t>(header_bytes_);
  char prefix[kPrefix];
  std::memcpy(prefix, &length, sizeof(prefix));
  AWQD_RETURN_IF_ERROR(file_->Overwrite(0, absl::string_view(prefix, sizeof(prefix))));
  AWQD_RETURN_IF_ERROR(file_->Overwrite(kPrefix, text));
  return file_->Close();
}

}  // namespace awqd::tools
