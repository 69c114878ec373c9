// Credentials: what connections and calls of a client show, read from its files.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/security.h"
#include "grpcpp/client_context.h"
#include "grpcpp/security/credentials.h"

namespace awqd::client {

class Credentials {
 public:
  // For connections to `address`. INVALID_ARGUMENT names the file that cannot be read or does not
  // hold what it should, and never what is in it.
  static absl::StatusOr<Credentials> Read(const std::string& address, const Security& security);

  const std::shared_ptr<grpc::ChannelCredentials>& channel() const { return channel_; }
  // "Bearer TOKEN", or empty.
  const std::string& authorization() const { return authorization_; }
  // Adds the token, if there is one, to a call that has not begun.
  void Authorize(grpc::ClientContext& context) const {
    if (!authorization_.empty()) context.AddMetadata("authorization", authorization_);
  }
  // Adds a question about TLS to an UNAVAILABLE whose text looks as if one side speaks TLS and the
  // other does not, or as if one does not trust the other. Other statuses stay as they are.
  absl::Status WithQuestion(const absl::Status& status) const;

 private:
  bool tls_ = false, has_certificate_ = false;
  std::shared_ptr<grpc::ChannelCredentials> channel_;
  std::string authorization_;  // "Bearer TOKEN"
};

}  // namespace awqd::client
