// OwnedMessages: gives unary handlers a mutable request, so that a payload is moved to the engine
// instead of copied, and lets them free it before the answer is computed.
#pragma once

#include <memory>

#include "grpcpp/support/message_allocator.h"

namespace awqd {

template <typename Request, typename Response>
class OwnedMessages : public grpc::MessageAllocator<Request, Response> {
 public:
  grpc::MessageHolder<Request, Response>* AllocateMessages() override { return new Holder; }

 private:
  class Holder : public grpc::MessageHolder<Request, Response> {
   public:
    Holder() : request_(std::make_unique<Request>()) {
      this->set_request(request_.get());
      this->set_response(&response_);
    }
    void Release() override { delete this; }
    void FreeRequest() override {
      request_.reset();
      this->set_request(nullptr);
    }

   private:
    std::unique_ptr<Request> request_;
    Response response_;
  };
};

// The request of a call whose method uses OwnedMessages. gRPC hands it over as const although the
// handler is its only user.
template <typename Request>
Request* Mutable(const Request* request) {
  return const_cast<Request*>(request);
}

}  // namespace awqd
