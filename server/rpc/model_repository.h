// The ModelRepository service over ModelStore. Loads run on a worker, never on the loop's threads,
// and go on when their client goes away: what it set out to do stays wanted.
#pragma once

#include "awqd/v1/model_repository.grpc.pb.h"
#include "server/rpc/call_loop.h"
#include "server/rpc/rpc_env.h"

namespace awqd {

using RawModelRepository = v1::ModelRepository::WithRawMethod_ListModels<
    v1::ModelRepository::WithRawMethod_GetModel<v1::ModelRepository::WithRawMethod_LoadModel<
        v1::ModelRepository::WithRawMethod_UnloadModel<v1::ModelRepository::Service>>>>;

class ModelRepositoryService final : public RawModelRepository {
 public:
  explicit ModelRepositoryService(const RpcEnv& env) : env_(env) {}

  void ServeOn(CallLoop* loop);

 private:
  const RpcEnv& env_;
};

}  // namespace awqd
