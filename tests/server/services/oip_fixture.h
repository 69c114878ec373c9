// OipTest: RpcTest with a stub of the inference protocol and requests for its model "tiny".
#pragma once

#include <memory>
#include <string>

#include "inference/grpc_service.grpc.pb.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {

// For the weight "layer" of "tiny", which is [128, 16].
inline inference::ModelInferRequest GoodInfer(int64_t tokens = 2) {
  inference::ModelInferRequest request;
  request.set_model_name("tiny/layer");
  auto* x = request.add_inputs();
  x->set_name("x");
  x->set_datatype("FP16");
  x->add_shape(tokens);
  x->add_shape(128);
  request.add_raw_input_contents(std::string(tokens * 256, '\0'));
  return request;
}

class OipTest : public RpcTest {
 protected:
  using Stub = inference::GRPCInferenceService::Stub;

  void SetUp() override {
    RpcTest::SetUp();
    oip_ = inference::GRPCInferenceService::NewStub(channel_);
  }

  // Calls a unary method.
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    Deadline(&context);
    return (oip_.get()->*method)(&context, request, response);
  }
  grpc::Status Infer(const inference::ModelInferRequest& request,
                     inference::ModelInferResponse* response) {
    return Call(&Stub::ModelInfer, request, response);
  }
  inference::ModelInferResponse Answered(const inference::ModelInferRequest& request) {
    inference::ModelInferResponse response;
    const grpc::Status status = Infer(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  void ExpectRefused(const inference::ModelInferRequest& request, const std::string& message,
                     grpc::StatusCode code = grpc::StatusCode::INVALID_ARGUMENT) {
    inference::ModelInferResponse response;
    const grpc::Status status = Infer(request, &response);
    EXPECT_EQ(status.error_code(), code) << message;
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr(message));
  }

  std::unique_ptr<Stub> oip_;
};

}  // namespace awqd::services
