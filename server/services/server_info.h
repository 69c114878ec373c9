// The ServerInfo service: version, device, kernel rows, limits.
#pragma once

#include "awqd/v1/server_info.grpc.pb.h"
#include "kernels/registry.h"
#include "server/services/env.h"
#include "server/transport/call_loop.h"

namespace awqd::services {

using RawServerInfo = v1::ServerInfo::WithRawMethod_GetServerInfo<v1::ServerInfo::Service>;

class ServerInfoService final : public RawServerInfo {
 public:
  explicit ServerInfoService(const Env& env) : env_(env) {}

  void ServeOn(transport::CallLoop* loop);

 private:
  absl::Status Fill(v1::GetServerInfoResponse* response) const;

  const Env& env_;
};

// One line of the support matrix, with whether `device` can run the row on a weight that suits it.
void FillKernel(const KernelRow& row, const DeviceInfo& device, v1::KernelInfo* out);

}  // namespace awqd::services
