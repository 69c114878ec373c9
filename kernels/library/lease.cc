// Leases of awqd.h: weights of a server on this machine, mapped for reading.
//
// Attacker: whoever listens at the path. The manifest is copied before it is read, and believed in
// nothing that can be computed: layout and size of each weight are what this library chooses for its
// shape. What the memory holds is believed, as a checkpoint's numbers are, but for the orders, which
// kernels take for indices. A lender can change what it lent. Digests find what broke on the way, and
// no lender who means to lie.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kernels/base/digest.h"
#include "kernels/base/text.h"
#include "kernels/base/unique_fd.h"
#include "kernels/kernels.h"
#include "kernels/layouts/layout.h"
#include "kernels/lending/arena.h"
#include "kernels/lending/manifest.h"
#include "kernels/library/objects.h"
#include "kernels/plan/plan.h"

namespace awqd::library {
namespace {

using lending::LeaseAnswer, lending::LeaseRequest, lending::LentWeight, lending::Manifest;

constexpr int kAnswerTimeoutS = 30;

// The connection, which is the lease, and the memory. Weights share it.
struct Attached {
  std::shared_ptr<Device> device;  // outlives the mapping
  UniqueFd socket;
  Buffer memory;
};

}  // namespace
}  // namespace awqd::library

struct awqd_lease {
  std::string path, model;  // for messages
  int64_t model_version = 0;
  std::shared_ptr<awqd::library::Attached> attached;
  struct Weight {
    std::shared_ptr<const awqd::DeviceWeight> weight;
    uint64_t digest = 0;  // of the manifest
    awqd_part part = {};
  };
  std::map<std::string, Weight, std::less<>> weights;
  std::vector<const std::string*> paths;
};

namespace awqd::library {
namespace {

absl::Status Unavailable(absl::string_view path, absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("lender at ", Quoted(path, 1024), ": ", what));
}

absl::StatusOr<UniqueFd> Connect(absl::string_view path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return BadValue("path", absl::StrCat(path.size(), " bytes"),
                    absl::StrCat("at most ", sizeof(address.sun_path) - 1));
  }
  path.copy(address.sun_path, path.size());
  UniqueFd out(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!out.ok() ||
      connect(out.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const int error = errno;
    const absl::Status status = Unavailable(path, absl::StrCat("connect: ", strerror(error)));
    return error == EACCES || error == EPERM ? absl::PermissionDeniedError(status.message())
                                             : status;
  }
  const timeval timeout = {.tv_sec = kAnswerTimeoutS, .tv_usec = 0};
  setsockopt(out.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(out.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  return out;
}

// Receives exactly `bytes`, and the descriptors that come with them.
absl::Status Receive(const UniqueFd& socket, absl::string_view path, void* data, size_t bytes,
                     std::vector<UniqueFd>* descriptors) {
  size_t got = 0;
  while (got < bytes) {
    iovec part = {static_cast<char*>(data) + got, bytes - got};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t count = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return Unavailable(path, count == 0 ? "it closed the connection"
                                          : absl::StrCat("no answer: ", strerror(errno)));
    }
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const size_t sent = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < sent; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        descriptors->emplace_back(fd);
      }
    }
    got += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

struct Lent {
  std::string manifest;
  UniqueFd memory;
};

absl::StatusOr<std::string> ReadManifest(const UniqueFd& file, int64_t bytes) {
  if (bytes < 0 || bytes > lending::kMaxManifestBytes) {
    return BadValue("manifest", absl::StrCat(bytes, " bytes"),
                    absl::StrCat("0 to ", lending::kMaxManifestBytes));
  }
  // A file that claims more than it holds must not have so much allocated.
  struct stat status = {};
  if (fstat(file.get(), &status) != 0 || status.st_size != bytes) {
    return BadValue("manifest", absl::StrCat(status.st_size, " bytes"), bytes);
  }
  std::string out(static_cast<size_t>(bytes), '\0');
  for (size_t got = 0; got < out.size();) {
    const ssize_t count =
        pread(file.get(), out.data() + got, out.size() - got, static_cast<off_t>(got));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("manifest: cannot be read: ", count == 0 ? "it ends" : strerror(errno)));
    }
    got += static_cast<size_t>(count);
  }
  return out;
}

// Sends the request, and receives what is lent.
absl::StatusOr<Lent> Ask(const UniqueFd& socket, const DeviceInfo& device, absl::string_view path,
                         absl::string_view model, absl::string_view token) {
  const std::string authorization = token.empty() ? "" : absl::StrCat("Bearer ", token);
  LeaseRequest request = {.device = {},
                          .model_bytes = static_cast<uint32_t>(model.size()),
                          .token_bytes = static_cast<uint32_t>(authorization.size())};
  lending::NameForLease(device).copy(request.device, sizeof(request.device) - 1);
  const std::string sent =
      absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&request), sizeof(request)),
                   model, authorization);
  // A lender that has no room answers at once, and takes no request.
  const bool taken = send(socket.get(), sent.data(), sent.size(), MSG_NOSIGNAL) ==
                     static_cast<ssize_t>(sent.size());
  const int error = errno;
  std::vector<UniqueFd> descriptors;
  LeaseAnswer answer;
  const absl::Status answered = Receive(socket, path, &answer, sizeof(answer), &descriptors);
  if (!answered.ok() && !taken) return Unavailable(path, absl::StrCat("send: ", strerror(error)));
  AWQD_RETURN_IF_ERROR(answered);
  if (answer.magic != lending::kMagic) return Unavailable(path, "what answers lends no weights");
  if (answer.protocol != lending::kProtocol) {
    return absl::FailedPreconditionError(absl::StrCat("lender at ", Quoted(path, 1024),
                                                      ": got protocol ", answer.protocol,
                                                      ", expected ", lending::kProtocol));
  }
  if (answer.text_bytes > lending::kMaxTextBytes) {
    return Unavailable(path,
                       absl::StrCat("an answer with a text of ", answer.text_bytes, " bytes"));
  }
  std::string text(answer.text_bytes, '\0');
  AWQD_RETURN_IF_ERROR(Receive(socket, path, text.data(), text.size(), &descriptors));
  if (answer.code != 0) {
    const bool known = answer.code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
    return absl::Status(
        known ? static_cast<absl::StatusCode>(answer.code) : absl::StatusCode::kUnknown,
        absl::StrCat("lender at ", Quoted(path, 1024), ": ", OneLine(text)));
  }
  if (descriptors.size() != 2) {
    return BadValue("answer", absl::StrCat(descriptors.size(), " descriptors"), 2);
  }
  Lent out;
  AWQD_ASSIGN_OR_RETURN(out.manifest, ReadManifest(descriptors[0], answer.manifest_bytes));
  out.memory = std::move(descriptors[1]);
  return out;
}

// Layouts and kernels for the shapes of a model, of which it has few.
class Planner {
 public:
  explicit Planner(const DeviceInfo& device) : device_(device) {}

  absl::StatusOr<const Plan*> Choose(const WeightShape& shape) {
    const auto key = std::make_tuple(ToString(shape.scheme), shape.k, shape.n, shape.scale_octaves,
                                     shape.large_scales);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return &found->second;
    AWQD_ASSIGN_OR_RETURN(Plan plan, Select(shape, device_, AllKernels()));
    return &plans_.emplace(key, std::move(plan)).first->second;
  }

 private:
  const DeviceInfo& device_;
  std::map<std::tuple<std::string, int64_t, int64_t, int, bool>, Plan> plans_;
};

// Each feature once.
absl::Status CheckOrder(const DeviceWeight& weight, Stream* stream) {
  if (!weight.sections.Has(Part::kOrder)) return absl::OkStatus();
  const int64_t k = weight.shape.k;
  std::vector<int32_t> order(k);
  AWQD_RETURN_IF_ERROR(
      weight.device->CopyToHost(order.data(), weight.order(), k * 4, stream->view()));
  AWQD_RETURN_IF_ERROR(stream->Synchronize());
  std::vector<bool> seen(k);
  for (const int32_t row : order) {
    if (row < 0 || row >= k || seen[row]) {
      return BadValue("order", row, absl::StrCat("each of 0 to ", k - 1, " once"));
    }
    seen[row] = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<DeviceWeight>> Attach(const LentWeight& lent, Planner* planner,
                                                     const std::shared_ptr<Attached>& attached) {
  AWQD_ASSIGN_OR_RETURN(const Plan* const plan, planner->Choose(lent.shape));
  if (plan->layout->name != lent.layout) {
    return absl::FailedPreconditionError(absl::StrCat("layout: got ", Quoted(lent.layout),
                                                      ", expected ", plan->layout->name,
                                                      ", which this device's kernels read"));
  }
  HostWeight parts;  // whether it has them is all that is asked of it
  parts.order.resize(lent.order);
  parts.factor.resize(lent.factor);
  parts.bias.resize(lent.bias);
  auto out = std::make_shared<DeviceWeight>();
  out->sections = SectionsOf(*plan->layout, lent.shape, &parts);
  if (out->sections.total() != lent.bytes) {
    return BadValue("bytes", lent.bytes, out->sections.total());
  }
  out->shape = lent.shape;
  out->format = lent.format;
  out->layout = plan->layout;
  out->plan = plan->rows;
  out->hadamard = lent.hadamard;
  out->activations = lent.activations;
  out->device = attached->device.get();
  out->storage = Buffer(static_cast<uint8_t*>(attached->memory.data()) + lent.offset, lent.bytes,
                        [attached](void*, int64_t) {});
  return out;
}

absl::Status OpenLease(awqd_device* device, const char* path, const char* model, const char* token,
                       awqd_lease** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("device", device));
  AWQD_RETURN_IF_ERROR(CheckPointer("path", path));
  AWQD_RETURN_IF_ERROR(CheckPointer("model", model));
  AWQD_RETURN_IF_ERROR(CheckPointer("lease", out));
  const absl::string_view shown = token == nullptr ? "" : token;
  if (strlen(model) > lending::kMaxModelBytes) {
    return BadValue("model", absl::StrCat(strlen(model), " bytes"),
                    absl::StrCat("at most ", lending::kMaxModelBytes));
  }
  if (shown.size() > lending::kMaxTokenBytes - 16) {
    return BadValue("token", absl::StrCat(shown.size(), " bytes"),
                    absl::StrCat("at most ", lending::kMaxTokenBytes - 16));
  }
  auto lease = std::make_unique<awqd_lease>();
  lease->path = std::string(absl::StripPrefix(path, "unix:"));
  lease->model = model;
  lease->attached = std::make_shared<Attached>();
  Attached& attached = *lease->attached;
  attached.device = device->device;
  AWQD_ASSIGN_OR_RETURN(MemoryExporter* const exporter, ExporterOf(*device->device));
  AWQD_ASSIGN_OR_RETURN(attached.socket, Connect(lease->path));
  const DeviceInfo& info = device->device->info();
  AWQD_ASSIGN_OR_RETURN(const Lent lent, Ask(attached.socket, info, lease->path, model, shown));
  AWQD_ASSIGN_OR_RETURN(const Manifest manifest, lending::Parse(lent.manifest, AWQD_VERSION));
  AWQD_ASSIGN_OR_RETURN(attached.memory, exporter->Import(lent.memory, manifest.memory_bytes));
  lease->model_version = manifest.model_version;
  AWQD_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->device->CreateCopyStream());
  Planner planner(info);
  for (const LentWeight& weight : manifest.weights) {
    auto made = Attach(weight, &planner, lease->attached);
    absl::Status status = made.status();
    if (made.ok()) status = CheckOrder(**made, stream.get());
    if (!status.ok()) return Prefixed(absl::StrCat("weight ", Quoted(weight.path)), status);
    const awqd_part part = {.size = sizeof(part),
                            .k = weight.whole_k,
                            .n = weight.whole_n,
                            .row_begin = weight.row_begin,
                            .col_begin = weight.col_begin};
    const auto at =
        lease->weights
            .emplace(weight.path, awqd_lease::Weight{*std::move(made), weight.digest, part})
            .first;
    lease->paths.push_back(&at->first);
  }
  *out = lease.release();
  return absl::OkStatus();
}

absl::StatusOr<const awqd_lease::Weight*> Find(const awqd_lease* lease, const char* linear) {
  AWQD_RETURN_IF_ERROR(CheckPointer("lease", lease));
  AWQD_RETURN_IF_ERROR(CheckPointer("linear", linear));
  const auto found = lease->weights.find(linear);
  if (found != lease->weights.end()) return &found->second;
  return absl::NotFoundError(absl::StrCat("linear ", Quoted(linear), ": not in the lease of ",
                                          Quoted(lease->model), ", which has ",
                                          lease->weights.size(), " quantised linears"));
}

absl::Status TakeWeight(const awqd_lease* lease, const char* linear, awqd_weight** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("weight", out));
  AWQD_ASSIGN_OR_RETURN(const awqd_lease::Weight* const found, Find(lease, linear));
  const auto& weight = found->weight;
  *out = new awqd_weight{lease->attached->device, weight, ToString(weight->shape.scheme)};
  return absl::OkStatus();
}

absl::Status DescribePart(const awqd_lease* lease, const char* linear, awqd_part* out) {
  AWQD_RETURN_IF_ERROR(CheckStructure("part", out));
  AWQD_ASSIGN_OR_RETURN(const awqd_lease::Weight* const found, Find(lease, linear));
  *out = found->part;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ReadDigest(const DeviceWeight& weight, Stream* stream) {
  const auto* const bytes = static_cast<const uint8_t*>(weight.storage.data());
  if (weight.device->host_addressable()) return DigestOfWeight(bytes, weight.bytes());
  const std::unique_ptr<uint8_t[]> host(new uint8_t[weight.bytes()]);
  AWQD_RETURN_IF_ERROR(
      weight.device->CopyToHost(host.get(), bytes, weight.bytes(), stream->view()));
  AWQD_RETURN_IF_ERROR(stream->Synchronize());
  return DigestOfWeight(host.get(), weight.bytes());
}

absl::Status CheckContents(const awqd_lease* lease) {
  AWQD_RETURN_IF_ERROR(CheckPointer("lease", lease));
  AWQD_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream,
                        lease->attached->device->CreateCopyStream());
  for (const auto& [path, lent] : lease->weights) {
    AWQD_ASSIGN_OR_RETURN(const uint64_t digest, ReadDigest(*lent.weight, stream.get()));
    if (digest == lent.digest) continue;
    return BadValue(absl::StrCat("weight ", Quoted(path), ": digest"),
                    absl::StrFormat("%016x", digest), absl::StrFormat("%016x", lent.digest));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace awqd::library

using awqd::library::Call;

int awqd_lease_open(awqd_device* device, const char* path, const char* model, const char* token,
                    awqd_lease** lease) {
  return Call([&] { return awqd::library::OpenLease(device, path, model, token, lease); });
}
void awqd_lease_close(awqd_lease* lease) { delete lease; }
size_t awqd_lease_linears(const awqd_lease* lease) { return lease->paths.size(); }
const char* awqd_lease_linear(const awqd_lease* lease, size_t index) {
  return index < lease->paths.size() ? lease->paths[index]->c_str() : nullptr;
}
int64_t awqd_lease_model_version(const awqd_lease* lease) { return lease->model_version; }
int awqd_lease_check(const awqd_lease* lease) {
  return Call([&] { return awqd::library::CheckContents(lease); });
}
int awqd_lease_part(const awqd_lease* lease, const char* linear, awqd_part* part) {
  return Call([&] { return awqd::library::DescribePart(lease, linear, part); });
}
int awqd_lease_weight(const awqd_lease* lease, const char* linear, awqd_weight** weight) {
  return Call([&] { return awqd::library::TakeWeight(lease, linear, weight); });
}
