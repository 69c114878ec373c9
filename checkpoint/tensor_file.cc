// Reading of tensors.
#include "checkpoint/tensor_file.h"

#include "absl/strings/str_cat.h"

namespace awqd::model {

absl::Status TensorFile::Read(const TensorInfo& tensor, absl::Span<uint8_t> out) const {
  if (static_cast<int64_t>(out.size()) != tensor.bytes()) {
    return absl::InternalError(absl::StrCat(file_.shown_name(), ": got a buffer of ", out.size(),
                                            " bytes, expected ", tensor.bytes()));
  }
  return file_.ReadAt(data_offset_ + tensor.begin, out);
}

absl::Status CheckCancelled(const std::atomic<bool>* cancelled, int64_t count) {
  constexpr int64_t kEvery = 10'000;
  if (cancelled == nullptr || count % kEvery != 0 || !*cancelled) return absl::OkStatus();
  return absl::UnavailableError("opening the model was cancelled, the server is shutting down");
}

}  // namespace awqd::model
