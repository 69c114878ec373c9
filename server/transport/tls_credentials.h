// TlsCredentials: the certificates of gRPC's server, renewed while it serves.
//
// gRPC can watch files itself. But it takes a certificate and a key that do not belong together, as
// they lie there for a moment when they are renewed, and then fails handshakes. It also ends the
// process when a file shrinks while it is read. So gRPC watches copies in memory files, which were
// checked and which it cannot read half-written.
//
// Attacker: anyone who reads or changes messages on the way. Shown by memory_file_test and
// tests/e2e/security.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "kernels/base/unique_fd.h"
#include "server/security/options.h"
#include "server/security/tls_files.h"
#include "server/security/watched_files.h"

namespace awqd::transport {

// A file in memory with a path that others in this process can open. New contents replace the old
// ones at once: a reader of the path gets all of the one or all of the other.
class MemoryFile {
 public:
  // `name` is seen in /proc alone.
  static absl::StatusOr<std::unique_ptr<MemoryFile>> Create(const char* name,
                                                            const std::string& contents);

  // Its time of modification becomes a second later than that of the last contents.
  absl::Status Replace(const std::string& contents);
  std::string path() const;

 private:
  MemoryFile(const char* name, UniqueFd fd) : name_(name), fd_(std::move(fd)) {}

  const char* const name_;
  const UniqueFd fd_;
  time_t generation_ = 1;
};

class TlsCredentials {
 public:
  // INVALID_ARGUMENT as security::CheckTls; UNAVAILABLE when there is no memory for it.
  static absl::StatusOr<std::unique_ptr<TlsCredentials>> Create(const security::Options& options);

  // TLS 1.2 and newer. A new certificate serves connections that are made three seconds after it
  // was written, and later; those that stand keep theirs.
  const std::shared_ptr<grpc::ServerCredentials>& get() const { return credentials_; }
  // TlsFiles::expiry of the certificates in use. Thread-safe.
  absl::Time expiry() const { return absl::FromUnixSeconds(expiry_); }

 private:
  TlsCredentials() = default;
  absl::Status Use(const security::TlsFiles& files);
  // Logs once a day that the certificate expires within kExpirySoon, or has expired.
  void WarnOfExpiry(absl::Time now);

  std::unique_ptr<MemoryFile>
      identity_;  // certificates and key in one file, so that they belong together
  std::unique_ptr<MemoryFile> client_ca_;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::atomic<int64_t> expiry_{0};               // seconds since 1970
  absl::Time warned_at_ = absl::InfinitePast();  // by WarnOfExpiry, about this certificate
  std::unique_ptr<security::WatchedFiles> watch_;
};

}  // namespace awqd::transport
