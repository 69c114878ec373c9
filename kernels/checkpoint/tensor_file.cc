// Reading of tensors.
#include "kernels/checkpoint/tensor_file.h"

#include "absl/strings/str_cat.h"

namespace awqd::model {

absl::Status TensorFile::Read(const TensorInfo& tensor, absl::Span<uint8_t> out,
                              const std::atomic<bool>* cancelled) const {
  if (static_cast<int64_t>(out.size()) != tensor.bytes()) {
    return absl::InternalError(absl::StrCat(file_.shown_name(), ": got a buffer of ", out.size(),
                                            " bytes, expected ", tensor.bytes()));
  }
  return file_.ReadAt(data_offset_ + tensor.begin, out, cancelled);
}

}  // namespace awqd::model
