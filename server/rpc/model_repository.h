// The ModelRepository service over ModelStore. Loads run on a worker, never on callback threads.
#pragma once

#include "awqd/v1/model_repository.grpc.pb.h"
#include "server/rpc/rpc_env.h"

namespace awqd {

class ModelRepositoryService final : public v1::ModelRepository::CallbackService {
 public:
  explicit ModelRepositoryService(const RpcEnv& env) : env_(env) {}

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  // A load goes on when its client goes away: what it set out to do stays wanted.
  grpc::ServerUnaryReactor* LoadModel(grpc::CallbackServerContext* context,
                                      const v1::LoadModelRequest* request,
                                      v1::LoadModelResponse* response) override;
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context,
                                        const v1::UnloadModelRequest* request,
                                        v1::UnloadModelResponse* response) override;

 private:
  const RpcEnv& env_;
};

}  // namespace awqd
