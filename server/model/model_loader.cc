// Reading, decoding, preparing and freeing, weight by weight.
#include "server/model/model_loader.h"

#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/model/checkpoint.h"

namespace awqd {
namespace {

absl::Status CheckRoom(absl::string_view what, int64_t bytes, const Device& device) {
  const int64_t free = device.FreeBytes();
  if (bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": needs ", bytes, " bytes on ", device.info().id, ", got ", free,
                   " free (a reload needs room for both versions)"));
}

absl::Status Prefixed(absl::string_view path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("weight ", Quoted(path), ": ", status.message()));
}

absl::StatusOr<std::shared_ptr<const DeviceWeight>> LoadWeight(const Checkpoint& checkpoint,
                                                               const LinearLocation& linear,
                                                               Device& device,
                                                               std::vector<uint8_t>* scratch) {
  AWQD_ASSIGN_OR_RETURN(const CanonicalWeight weight, checkpoint.Read(linear, scratch));
  const absl::StatusOr<int64_t> bytes = PreparedBytes(weight, device.info());
  if (!bytes.ok()) return Prefixed(linear.path, bytes.status());
  AWQD_RETURN_IF_ERROR(CheckRoom(absl::StrCat("weight ", Quoted(linear.path)), *bytes, device));
  absl::StatusOr<std::shared_ptr<const DeviceWeight>> out = PrepareWeight(weight, device);
  if (!out.ok()) return Prefixed(linear.path, out.status());
  return out;
}

absl::StatusOr<std::shared_ptr<Model>> LoadWeights(const RepositoryRoot& root,
                                                   const std::string& name, Device& device,
                                                   const std::atomic<bool>& cancelled,
                                                   const ProgressLog& log) {
  AWQD_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(root, name));
  // No layout is smaller than the packed tensors, so this refuses at once what can never fit, and
  // bounds the host's buffers too.
  AWQD_RETURN_IF_ERROR(
      CheckRoom(absl::StrCat("model \"", name, "\""), checkpoint.total_bytes(), device));
  auto model = std::make_shared<Model>();
  model->name = name;
  model->quant_method = checkpoint.config().quant_method;
  model->ignored_tensors = checkpoint.ignored_tensors();
  Progress progress(name, checkpoint.total_bytes(),
                    static_cast<int64_t>(checkpoint.linears().size()), log, absl::Now);
  std::vector<uint8_t> scratch;
  for (const LinearLocation& linear : checkpoint.linears()) {
    if (cancelled) {
      return absl::UnavailableError(
          absl::StrCat("model \"", name, "\": load cancelled, the server is shutting down"));
    }
    AWQD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceWeight> weight,
                          LoadWeight(checkpoint, linear, device, &scratch));
    model->device_bytes += weight->bytes();
    model->weights.emplace(linear.path, std::move(weight));
    progress.Add(linear.bytes);
  }
  AWQD_RETURN_IF_ERROR(checkpoint.CheckUnchanged(root));
  model->load_ms = absl::ToInt64Milliseconds(progress.elapsed());
  return model;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Model>> LoadModel(const RepositoryRoot& root,
                                                 const std::string& name, Device& device,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressLog& log) {
  // The standard library reports exhausted host memory in no other way.
  try {
    return LoadWeights(root, name, device, cancelled, log);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("model \"", name, "\": host memory ran out while it was loaded"));
  }
}

}  // namespace awqd
