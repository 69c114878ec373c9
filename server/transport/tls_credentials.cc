// Memory files, and gRPC's credentials over them.
#include "server/transport/tls_credentials.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/grpc_security_constants.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::transport {
namespace {

constexpr unsigned int kRefreshSeconds = 1;  // gRPC's smallest
constexpr std::chrono::milliseconds kPollFiles(500);
// As the alert AwqdCertificateExpires of deploy/prometheus.
constexpr absl::Duration kExpirySoon = absl::Hours(14 * 24);

// An open file in memory with these contents and time, which nobody can change any more; none, with
// errno, on failure.
UniqueFd MakeFile(const char* name, const std::string& contents, time_t modified) {
  UniqueFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.ok()) return fd;
  const timespec time = {.tv_sec = modified, .tv_nsec = 0};
  const timespec times[2] = {time, time};
  const auto size = static_cast<ssize_t>(contents.size());
  if (write(fd.get(), contents.data(), contents.size()) != size || futimens(fd.get(), times) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    const int error = errno;
    fd.Reset();
    errno = error;
  }
  return fd;
}

absl::Status NoFile() {
  return absl::UnavailableError(
      absl::StrCat("cannot keep certificates in memory: ", std::strerror(errno)));
}

// Newer versions of gRPC have other names for these, which older ones do not know.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
std::shared_ptr<grpc::ServerCredentials> Credentials(const MemoryFile& identity,
                                                     const MemoryFile* client_ca) {
  namespace tls = grpc::experimental;
  const std::string path = identity.path();
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      path, path, client_ca == nullptr ? "" : client_ca->path(), kRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  if (client_ca != nullptr) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return tls::TlsServerCredentials(options);
}
#pragma GCC diagnostic pop

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryFile>> MemoryFile::Create(const char* name,
                                                               const std::string& contents) {
  UniqueFd fd = MakeFile(name, contents, 1);  // gRPC takes a time of 0 for an error
  if (!fd.ok()) return NoFile();
  return std::unique_ptr<MemoryFile>(new MemoryFile(name, std::move(fd)));
}

std::string MemoryFile::path() const { return absl::StrCat("/proc/self/fd/", fd_.get()); }

// gRPC reads the key and then the certificates, and begins again when the time, in whole seconds,
// is not what it was before. So the new time must differ, and come with the contents in one step.
absl::Status MemoryFile::Replace(const std::string& contents) {
  const UniqueFd fresh = MakeFile(name_, contents, ++generation_);
  if (!fresh.ok()) return NoFile();
  const bool replaced = dup3(fresh.get(), fd_.get(), O_CLOEXEC) == fd_.get();
  return replaced ? absl::OkStatus() : NoFile();
}

absl::Status TlsCredentials::Use(const security::TlsFiles& files) {
  const auto keep = [](const char* name, const std::string& contents,
                       std::unique_ptr<MemoryFile>* file) -> absl::Status {
    if (*file != nullptr) return (*file)->Replace(contents);
    AWQD_ASSIGN_OR_RETURN(*file, MemoryFile::Create(name, contents));
    return absl::OkStatus();
  };
  AWQD_RETURN_IF_ERROR(
      keep("awqd-tls", absl::StrCat(files.certificates, "\n", files.key), &identity_));
  if (!files.client_ca.empty()) {
    AWQD_RETURN_IF_ERROR(keep("awqd-ca", files.client_ca, &client_ca_));
  }
  if (credentials_ == nullptr) credentials_ = Credentials(*identity_, client_ca_.get());
  return absl::OkStatus();
}

void TlsCredentials::WarnOfExpiry(absl::Time now) {
  const absl::Duration left = expiry() - now;
  if (left > kExpirySoon || now - warned_at_ < absl::Hours(24)) return;
  warned_at_ = now;
  obs::LogEvent(left > absl::ZeroDuration() ? obs::LogLevel::kWarning : obs::LogLevel::kError,
                left > absl::ZeroDuration() ? "the server's certificate expires soon"
                                            : "the server's certificate has expired",
                {{"expires", absl::FormatTime(absl::RFC3339_sec, expiry(), absl::UTCTimeZone())}});
}

absl::StatusOr<std::unique_ptr<TlsCredentials>> TlsCredentials::Create(
    const security::Options& options) {
  std::unique_ptr<TlsCredentials> out(new TlsCredentials);
  TlsCredentials* const self = out.get();
  const auto apply = [self,
                      options](const security::WatchedFiles::Contents& contents) -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(const security::TlsFiles files, security::CheckTls(options, contents));
    AWQD_RETURN_IF_ERROR(self->Use(files));
    self->expiry_ = absl::ToUnixSeconds(files.expiry);
    self->warned_at_ = absl::InfinitePast();
    self->WarnOfExpiry(absl::Now());
    return absl::OkStatus();
  };
  AWQD_ASSIGN_OR_RETURN(
      out->watch_, security::WatchedFiles::Start(security::TlsPaths(options), apply, kPollFiles,
                                                 [self] { self->WarnOfExpiry(absl::Now()); }));
  return out;
}

}  // namespace awqd::transport
