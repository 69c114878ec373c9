// Importing memory and events, and copies by way of the host.
#include "server/services/memory/device_region.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

constexpr absl::string_view kMemory = "cuda_ipc_memory";

absl::StatusOr<std::shared_ptr<SharedEvent>> ImportEvent(Device& device, const std::string& handle,
                                                         absl::string_view field) {
  if (handle.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<SharedEvent>> event = device.ImportEvent(handle);
  if (!event.ok()) return wire::WithField(Prefixed(field, event.status()), field);
  return std::shared_ptr<SharedEvent>(*std::move(event));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const DeviceRegion>> DeviceRegion::Import(
    Device* device, const Handles& handles, const UniqueFd& descriptor) {
  const int64_t offset = handles.offset, size = handles.size;
  if (descriptor.ok() && !handles.memory.empty()) {
    return wire::FieldError(kMemory, "a handle and a descriptor", "one of them");
  }
  // A descriptor does not tell how large its memory is: the driver refuses to map more.
  int64_t end = 0;
  const bool overflows = __builtin_add_overflow(offset, size, &end);
  absl::StatusOr<Buffer> memory =
      !descriptor.ok() ? device->ImportMemory(handles.memory)
      : overflows      ? absl::InvalidArgumentError("got a size of 2^63 bytes or more")
                       : device->ImportMemory(descriptor, end);
  const absl::string_view from = descriptor.ok() ? "descriptor" : kMemory;
  if (!memory.ok()) return wire::WithField(Prefixed(from, memory.status()), from);
  if (offset < 0 || size < 0 || size > memory->size() || offset > memory->size() - size) {
    return wire::FieldError("size", absl::StrCat(size, " bytes from byte ", offset, " on"),
                            absl::StrCat("a range within the allocation's ", memory->size()));
  }
  std::shared_ptr<DeviceRegion> out(new DeviceRegion(device, *std::move(memory), offset, size));
  AWQD_ASSIGN_OR_RETURN(out->ready_, ImportEvent(*device, handles.ready, "ready_event"));
  AWQD_ASSIGN_OR_RETURN(out->finished_, ImportEvent(*device, handles.finished, "finished_event"));
  out->early_ = handles.early;
  if (handles.early && out->finished_ == nullptr) {
    return wire::FieldError("early_answers", "true without finished_event",
                            "the event that says when results are there");
  }
  return out;
}

absl::Status DeviceRegion::Copy(const CopyPiece& piece, const StreamPoint* point) const {
  MutexLock lock(&mu_);
  if (copies_ == nullptr) {
    AWQD_ASSIGN_OR_RETURN(copies_, device_->CreateCopyStream());
  }
  if (ready_ != nullptr) AWQD_RETURN_IF_ERROR(ready_->Wait(copies_->view()));
  if (point != nullptr && point->event != nullptr) {
    AWQD_RETURN_IF_ERROR(point->event->Wait(copies_->view()));
  }
  AWQD_RETURN_IF_ERROR(device_->CopyPieces({&piece, 1}, copies_->view()));
  if (finished_ != nullptr) AWQD_RETURN_IF_ERROR(finished_->Record(copies_->view()));
  return copies_->Synchronize();
}

}  // namespace awqd::services
