// The ModelRepository service over ModelStore. Loads run on a worker, never on the loop's threads,
// and go on when their client goes away: what it set out to do stays wanted. Lists look at the disk
// and run on a worker too, one of their own, so that they do not wait for loads.
#pragma once

#include "awqd/v1/model_repository.grpc.pb.h"
#include "server/rpc/call_loop.h"
#include "server/rpc/rpc_env.h"
#include "server/rpc/worker.h"

namespace awqd {

using RawModelRepository = v1::ModelRepository::WithRawMethod_ListModels<
    v1::ModelRepository::WithRawMethod_GetModel<v1::ModelRepository::WithRawMethod_LoadModel<
        v1::ModelRepository::WithRawMethod_UnloadModel<v1::ModelRepository::Service>>>>;

class ModelRepositoryService final : public RawModelRepository {
 public:
  explicit ModelRepositoryService(const RpcEnv& env) : env_(env) {}

  void ServeOn(CallLoop* loop);

 private:
  void StartList(UnaryCall* call);

  const RpcEnv& env_;
  Worker lists_{"lists of models", 1, 64};
};

}  // namespace awqd
