// ShareMemory: a stream that holds a region of a GPU's memory.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/services/env.h"
#include "server/services/info_stream.h"
#include "server/services/memory/regions.h"
#include "server/transport/call_loop.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

class ShareMemoryStream final : public InfoStream<transport::WriteCall> {
 public:
  ShareMemoryStream(const Env& env, Region region, transport::WriteCall* call,
                    transport::ByteLease lease, std::atomic<int>* open)
      : InfoStream(call, std::move(lease), open),
        env_(env),
        owner_(OwnerName(call->identity())),
        region_(std::move(region)) {}
  ~ShareMemoryStream() override {
    if (registered_) env_.regions->Unregister(owner_, region_.name, RegionKind::kDevice);
  }

 private:
  void Begin() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const absl::Status status = env_.regions->Register(owner_, region_);
    region_.device_memory = nullptr;  // the table's, or unmapped before the client hears of it
    if (!status.ok()) return EndLocked(wire::ToGrpc(status));
    registered_ = true;
    Write(wire::Encode(v1::ShareMemoryResponse()));
  }

  const Env& env_;
  const std::string owner_;
  Region region_;
  bool registered_ = false;
};

}  // namespace

absl::StatusOr<Region> ImportRegion(const Env& env, const v1::ShareMemoryRequest& request,
                                    UniqueFd descriptor) {
  AWQD_ASSIGN_OR_RETURN(Device* const device, FindSharingDevice(env, request.device()));
  AWQD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceRegion> memory,
                        DeviceRegion::Import(device,
                                             {.memory = request.cuda_ipc_memory(),
                                              .offset = request.offset(),
                                              .size = request.size(),
                                              .ready = request.ready_event(),
                                              .finished = request.finished_event(),
                                              .early = request.early_answers()},
                                             descriptor));
  return Region{.name = request.region(),
                .offset = request.offset(),
                .size = request.size(),
                .device_memory = std::move(memory)};
}

absl::StatusOr<Device*> FindSharingDevice(const Env& env, absl::string_view name) {
  const std::vector<Device*>& devices = env.options.sharing_devices;
  if (devices.empty()) {
    return absl::UnimplementedError(
        "memory of GPUs: this server takes none: it runs without --cuda_shared_memory, or without "
        "a GPU");
  }
  for (Device* const device : devices) {
    const DeviceInfo& info = device->info();
    if (name == info.id || (!name.empty() && absl::EqualsIgnoreCase(name, info.pci_bus_id))) {
      return device;
    }
  }
  return wire::FieldError(
      "device", absl::StrCat("\"", obs::LogText(name, 64), "\""),
      absl::StrJoin(devices, " or ", [](std::string* out, const Device* device) {
        absl::StrAppend(out, device->info().id, " (", device->info().pci_bus_id, ")");
      }));
}

void ServeShareMemory(const Env& env) {
  constexpr int kSlots = 4;
  constexpr int kMost = 4096;
  const auto open = std::make_shared<std::atomic<int>>(0);
  env.loop->Serve<transport::WriteCall>(
      "awqd.v1.QuantizedInference/ShareMemory", security::Need::kInfer, kSlots,
      [&env, open](transport::WriteCall* call) {
        std::shared_ptr<ShareMemoryStream> stream;
        const absl::Status status = CatchExceptions([&]() -> absl::Status {
          const auto bytes = static_cast<int64_t>(call->request()->Length());
          AWQD_ASSIGN_OR_RETURN(transport::ByteLease lease,
                                env.in_flight->AcquireBytes(call->charge(), bytes, "request"));
          v1::ShareMemoryRequest request;
          AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), &request));
          AWQD_ASSIGN_OR_RETURN(Region region, ImportRegion(env, request));
          stream = std::make_shared<ShareMemoryStream>(env, std::move(region), call,
                                                       std::move(lease), open.get());
          return absl::OkStatus();
        });
        if (!status.ok()) return call->Finish(wire::ToGrpc(status));
        stream->Start(env.admission->drain(), kMost, "regions");
      });
}

}  // namespace awqd::services
