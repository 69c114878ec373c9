// The ServerInfo service: version, device, kernel rows, limits.
#pragma once

#include "awqd/v1/server_info.grpc.pb.h"
#include "kernels/registry.h"
#include "server/rpc/rpc_env.h"

namespace awqd {

class ServerInfoService final : public v1::ServerInfo::CallbackService {
 public:
  explicit ServerInfoService(const RpcEnv& env) : env_(env) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;

 private:
  const RpcEnv& env_;
};

// One line of the support matrix, with whether `device` can run the row on a weight that suits it.
void FillKernel(const KernelRow& row, const DeviceInfo& device, v1::KernelInfo* out);

}  // namespace awqd
