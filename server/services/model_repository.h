// The ModelRepository service over ModelStore. Loads run on a worker, never on the loop's threads,
// and go on when their client goes away: what it set out to do stays wanted. Lists look at the disk
// and run on a worker too, one of their own, so that they do not wait for loads.
#pragma once

#include "awqd/v1/model_repository.grpc.pb.h"
#include "server/services/env.h"
#include "server/services/worker.h"
#include "server/transport/call_loop.h"

namespace awqd::services {

using RawModelRepository = v1::ModelRepository::WithRawMethod_ListModels<
    v1::ModelRepository::WithRawMethod_GetModel<v1::ModelRepository::WithRawMethod_LoadModel<
        v1::ModelRepository::WithRawMethod_UnloadModel<v1::ModelRepository::Service>>>>;

class ModelRepositoryService final : public RawModelRepository {
 public:
  explicit ModelRepositoryService(const Env& env) : env_(env) {}

  void ServeOn(transport::CallLoop* loop);

 private:
  void StartList(transport::UnaryCall* call);

  const Env& env_;
  Worker lists_{"lists of models", 1, 64};
};

}  // namespace awqd::services
