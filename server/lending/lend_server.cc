// The socket, the thread that answers it, and what of a model is lent.
#include "server/lending/lend_server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/lending/manifest.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"

namespace awqd::lending {
namespace {

constexpr char kMethod[] = "awqd.lending/LeaseWeights";
// How long no connection is accepted after descriptors ran out.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

// A device's share of a model, as it is lent: whole weights, and its parts of others.
absl::StatusOr<Manifest> MakeManifest(const model::Model& model, const Device& device,
                                      const WeightArena& arena) {
  Manifest out = {.awqd_version = AWQD_VERSION,
                  .layouts = LayoutsDigest(),
                  .model_version = model.version,
                  .memory_bytes = arena.bytes()};
  for (const auto& [path, weight] : model.weights) {
    for (const model::WeightPart& part : weight->parts) {
      if (part.weight->device != &device) continue;
      LentWeight& lent = out.weights.emplace_back(Describe(path, *part.weight, arena));
      lent.whole_k = weight->shape.k;
      lent.whole_n = weight->shape.n;
      lent.row_begin = part.row_begin;
      lent.col_begin = part.col_begin;
    }
  }
  if (!out.weights.empty()) return out;
  return absl::FailedPreconditionError(
      absl::StrCat("model \"", model.name, "\": ", device.info().id, " has none of its weights"));
}

// The arena of a model on the device that a request names.
absl::StatusOr<std::pair<const Device*, const WeightArena*>> FindArena(const model::Model& model,
                                                                       absl::string_view device) {
  std::string devices;
  for (const auto& [on, arena] : model.arenas) {
    const std::string name = NameForLease(on->info());
    if (name == device) return std::make_pair(on, arena.get());
    absl::StrAppend(&devices, devices.empty() ? "" : ", ", name);
  }
  return absl::FailedPreconditionError(absl::StrCat("model \"", model.name, "\": got device ",
                                                    Quoted(device), ", expected ",
                                                    devices.empty() ? "none" : devices));
}

// Empty where several models are served, or none.
std::string NameOfOnlyModel(const repository::ModelStore& models) {
  std::string out;
  for (const repository::ModelStatus& status : models.ListServed()) {
    if (status.model == nullptr) continue;
    if (!out.empty()) return "";
    out = status.name;
  }
  return out;
}

// A memfd of these bytes that nobody can change.
absl::StatusOr<UniqueFd> MakeFile(absl::string_view bytes) {
  UniqueFd out(memfd_create("awqd-manifest", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  bool written = out.ok();
  for (size_t sent = 0; written && sent < bytes.size();) {
    const ssize_t count = write(out.get(), bytes.data() + sent, bytes.size() - sent);
    written = count > 0 || (count < 0 && errno == EINTR);
    sent += count > 0 ? static_cast<size_t>(count) : 0;
  }
  if (written && fcntl(out.get(), F_ADD_SEALS,
                       F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    return out;
  }
  return absl::ResourceExhaustedError(absl::StrCat("manifest: ", strerror(errno)));
}

// Sends an answer and its descriptors. False: the borrower reads nothing.
bool SendAnswer(int socket, LeaseAnswer answer, absl::string_view text,
                const std::array<int, 2>* descriptors) {
  answer.text_bytes = static_cast<uint32_t>(text.size());
  iovec parts[2] = {{&answer, sizeof(answer)}, {const_cast<char*>(text.data()), text.size()}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(*descriptors))] = {};
  if (descriptors != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(*descriptors));
    std::memcpy(CMSG_DATA(header), descriptors->data(), sizeof(*descriptors));
  }
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof(answer) + text.size());
}

}  // namespace

struct LendServer::Connection {
  UniqueFd socket;
  std::string origin;  // "user 1000"
  pid_t process = 0;   // that connected
  absl::Time opened;
  std::string input;  // of the request
  bool lent = false;
  bool ended = false;
};

LendServer::LendServer(const repository::ModelStore* models, const security::Access* access,
                       const std::atomic<bool>* starting)
    : models_(models), access_(access), starting_(starting) {}

LendServer::~LendServer() { Stop(); }

absl::Status LendServer::Start(const std::string& path, mode_t mode,
                               absl::Duration handshake_timeout) {
  handshake_timeout_ = handshake_timeout;
  AWQD_ASSIGN_OR_RETURN(listening_, transport::ListenOnPath(path, mode));
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot wait for connections: ", strerror(errno)));
  }
  thread_ = std::thread([this] { Run(); });
  obs::LogEvent(obs::LogLevel::kInfo, "lending weights", {{"path", obs::LogText(path, 1024)}});
  return absl::OkStatus();
}

void LendServer::Stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
  listening_ = {};
}

obs::LeaseStats LendServer::statistics() const {
  obs::LeaseStats out = {.refused = refused_.load(std::memory_order_relaxed)};
  MutexLock lock(&mu_);
  for (const auto& [connection, lease] : leases_) out.leases.push_back(lease);
  return out;
}

int64_t LendServer::leases(const std::string& model) const {
  MutexLock lock(&mu_);
  return absl::c_count_if(leases_, [&](const auto& one) { return one.second.model == model; });
}

void LendServer::Run() {
  std::vector<pollfd> waits;
  while (!stopping_) {
    const absl::Time now = absl::Now();
    const bool accepting = now >= accept_again_;
    absl::Time until = accepting ? absl::InfiniteFuture() : accept_again_;
    waits.clear();
    waits.push_back({.fd = wake_.get(), .events = POLLIN});
    waits.push_back({.fd = accepting ? listening_.sockets[0].get() : -1, .events = POLLIN});
    for (const Connection& connection : connections_) {
      waits.push_back({.fd = connection.socket.get(), .events = POLLIN});
      if (!connection.lent) until = std::min(until, connection.opened + handshake_timeout_);
    }
    const int timeout_ms = until == absl::InfiniteFuture()
                               ? -1
                               : static_cast<int>(std::clamp<int64_t>(
                                     absl::ToInt64Milliseconds(until - now) + 1, 1, 60'000));
    if (poll(waits.data(), waits.size(), timeout_ms) < 0 && errno != EINTR) continue;
    size_t at = 2;
    for (Connection& connection : connections_) {
      if (waits[at++].revents != 0) Read(&connection);
      if (!connection.lent && absl::Now() > connection.opened + handshake_timeout_) {
        connection.ended = true;
      }
    }
    connections_.remove_if([this](const Connection& connection) {
      if (connection.ended) End(connection);
      return connection.ended;
    });
    if (waits[1].revents != 0) Accept();
  }
  for (const Connection& connection : connections_) End(connection);
  connections_.clear();
}

void LendServer::Accept() {
  sockaddr_storage peer = {};
  socklen_t length = sizeof(peer);
  UniqueFd socket(accept4(listening_.sockets[0].get(), reinterpret_cast<sockaddr*>(&peer), &length,
                          SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.ok()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      accept_again_ = absl::Now() + kAcceptPause;
    }
    return;
  }
  Connection connection;
  connection.origin = obs::Origin(socket.get(), peer);
  ucred user = {};
  socklen_t size = sizeof(user);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &user, &size) == 0) {
    connection.process = user.pid;
  }
  connection.socket = std::move(socket);
  connection.opened = absl::Now();
  const auto own = static_cast<size_t>(absl::c_count_if(
      connections_, [&](const Connection& other) { return other.origin == connection.origin; }));
  if (connections_.size() < kMaxConnections && own < kMaxConnectionsOfUser) {
    connections_.push_back(std::move(connection));
    return;
  }
  Refuse(&connection, absl::ResourceExhaustedError(absl::StrCat(
                          "leases: got one more than the ", own, " of ", connection.origin,
                          " and the ", connections_.size(), " of all, expected at most ",
                          kMaxConnectionsOfUser, " and ", kMaxConnections)));
}

void LendServer::Read(Connection* connection) {
  std::array<char, sizeof(LeaseRequest) + kMaxModelBytes + kMaxTokenBytes> bytes;
  const ssize_t got = recv(connection->socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0 || connection->lent) {
    // Whoever has a lease has nothing to say.
    connection->ended = true;
    return;
  }
  connection->input.append(bytes.data(), static_cast<size_t>(got));
  LeaseRequest request;
  absl::string_view rest = connection->input;
  if (rest.size() < sizeof(request)) return;
  std::memcpy(&request, rest.data(), sizeof(request));
  rest.remove_prefix(sizeof(request));
  if (request.magic != kMagic || request.protocol != kProtocol) {
    return Refuse(connection, absl::FailedPreconditionError(
                                  absl::StrCat("protocol: got ", request.protocol, ", expected ",
                                               kProtocol, " of awqd ", AWQD_VERSION)));
  }
  if (request.model_bytes > kMaxModelBytes || request.token_bytes > kMaxTokenBytes) {
    return Refuse(connection, BadValue("request",
                                       absl::StrCat(request.model_bytes, " and ",
                                                    request.token_bytes, " bytes"),
                                       absl::StrCat("at most ", kMaxModelBytes, " of a model and ",
                                                    kMaxTokenBytes, " of a token")));
  }
  const size_t whole = size_t{request.model_bytes} + request.token_bytes;
  if (rest.size() < whole) return;
  const absl::string_view device(request.device, strnlen(request.device, sizeof(request.device)));
  const absl::Status lent = CatchExceptions([&]() -> absl::Status {
    if (rest.size() > whole) {
      return BadValue("request", absl::StrCat(rest.size(), " bytes of texts"), whole);
    }
    return Lend(connection, device, rest.substr(0, request.model_bytes),
                rest.substr(request.model_bytes));
  });
  if (!lent.ok()) Refuse(connection, lent);
  connection->input.clear();
}

absl::Status LendServer::Lend(Connection* connection, absl::string_view device,
                              absl::string_view name, absl::string_view authorization) {
  security::Credentials shown;
  if (!authorization.empty()) shown.authorizations.emplace_back(authorization);
  AWQD_ASSIGN_OR_RETURN(const security::IdentityPtr identity,
                        access_->Admit(kMethod, security::Need::kAttach, shown));
  const std::string only = name.empty() ? NameOfOnlyModel(*models_) : "";
  const auto found = models_->Find(name.empty() ? only : name);
  if (absl::IsNotFound(found.status()) && *starting_) {
    return absl::UnavailableError(
        absl::StrCat("model ", Quoted(name), ": the server is still loading its models"));
  }
  if (!found.ok()) return found.status();
  const model::Model& model = **found;
  AWQD_ASSIGN_OR_RETURN(const auto lent, FindArena(model, device));
  const auto [on, arena] = lent;
  if (!on->healthy()) {
    return absl::UnavailableError(absl::StrCat(on->info().id, " has failed"));
  }
  AWQD_ASSIGN_OR_RETURN(const Manifest manifest, MakeManifest(model, *on, *arena));
  const std::string text = Print(manifest);
  AWQD_ASSIGN_OR_RETURN(const UniqueFd file, MakeFile(text));
  const std::array<int, 2> descriptors = {file.get(), arena->descriptor()};
  const LeaseAnswer answer = {.manifest_bytes = static_cast<int64_t>(text.size())};
  // Before the borrower can ask how many there are.
  connection->lent = true;
  {
    MutexLock lock(&mu_);
    leases_[connection] = {
        .model = model.name,
        .device = on->info().id,
        .version = model.version,
        .bytes = arena->bytes(),
        .client = absl::StrCat(identity == nullptr ? "" : identity->name + ", ", connection->origin,
                               ", process ", connection->process),
        .since = absl::Now()};
  }
  if (!SendAnswer(connection->socket.get(), answer, "", &descriptors)) {
    connection->ended = true;
    return absl::OkStatus();
  }
  obs::LogLimited(
      obs::LogLevel::kInfo, "weights lent",
      {{"model", model.name},
       {"version", model.version},
       {"device", on->info().id},
       {"client", identity == nullptr ? connection->origin : obs::LogText(identity->name)},
       {"origin", connection->origin}});
  return absl::OkStatus();
}

void LendServer::Refuse(Connection* connection, const absl::Status& status) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  const std::string message(ClipUtf8(status.message(), kMaxTextBytes));
  obs::LogLimited(obs::LogLevel::kInfo, "lease refused",
                  {{"origin", connection->origin}, {"reason", obs::LogText(message, 1024)}});
  (void)SendAnswer(connection->socket.get(), {.code = static_cast<uint32_t>(status.code())},
                   message, nullptr);
  connection->ended = true;
}

void LendServer::End(const Connection& connection) {
  MutexLock lock(&mu_);
  leases_.erase(&connection);
}

}  // namespace awqd::lending
