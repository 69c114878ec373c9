// LendServer: lends the memory of served models' weights to processes of this machine, over a UNIX
// socket. kernels/lending/manifest.h has what is said there.
//
// A lease is a connection: it is counted, and ends with it. It keeps nothing alive here, because
// what a borrower maps stays without the server; memory of a version that was unloaded goes with
// its last mapping.
//
// Attacker: a user of this machine who may open the socket. Connections are bounded, a request is
// read as it comes, no send waits, and no byte of a request is believed.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/base/unique_fd.h"
#include "server/obs/snapshot.h"
#include "server/repository/model_store.h"
#include "server/security/access.h"
#include "server/transport/listening.h"

namespace awqd::lending {

class LendServer {
 public:
  // Leases and connections that ask for one, of all and of one user.
  static constexpr size_t kMaxConnections = 512, kMaxConnectionsOfUser = 256;

  // All of these outlive it. `starting`: unknown models are UNAVAILABLE and not NOT_FOUND.
  LendServer(const repository::ModelStore* models, const security::Access* access,
             const std::atomic<bool>* starting);
  ~LendServer();

  // Listens at `path`. `mode`: permissions of the socket file. Connections that ask for nothing
  // within `handshake_timeout` are closed. INVALID_ARGUMENT or UNAVAILABLE as ListenOnPath.
  absl::Status Start(const std::string& path, mode_t mode, absl::Duration handshake_timeout);
  // Ends every lease: nobody is counted any more.
  void Stop();

  obs::LeaseStats statistics() const;  // thread-safe
  // How many there are of all versions of a model. Thread-safe.
  int64_t leases(const std::string& model) const;

 private:
  struct Connection;

  void Run();
  void Accept();
  // Reads what has come, and answers once it is all there.
  void Read(Connection* connection);
  absl::Status Lend(Connection* connection, absl::string_view device, absl::string_view model,
                    absl::string_view token);
  void Refuse(Connection* connection, const absl::Status& status);
  void End(const Connection& connection);

  const repository::ModelStore* const models_;
  const security::Access* const access_;
  const std::atomic<bool>* const starting_;
  absl::Duration handshake_timeout_;
  transport::ListenSockets listening_;
  UniqueFd wake_;
  std::list<Connection> connections_;               // of the thread
  absl::Time accept_again_ = absl::InfinitePast();  // no descriptor was left before
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> refused_{0};
  mutable Mutex mu_;
  std::map<const Connection*, obs::Lease> leases_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace awqd::lending
