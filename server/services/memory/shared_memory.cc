// Opening, reading and writing ranges of shared-memory objects.
#include "server/services/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

// Where shm_open of the C library puts objects.
constexpr char kDirectory[] = "/dev/shm";
constexpr size_t kMaxPrefixBytes = 64;
constexpr size_t kMaxNameBytes = 128;
// From this size on a copy takes longer than waking a thread for it.
constexpr int64_t kWriteElsewhereBytes = 1 << 20;
constexpr int kWriters = 2;

bool IsPlain(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

constexpr absl::string_view kInputs[] = {
    "x",         "bias",           "activation_scales", "down_activation_scales",
    "ids",       "router_weights", "router_logits",     "correction_bias",
    "gate_bias", "up_bias",        "down_bias",         "shared_expert_gate"};
constexpr absl::string_view kOutputs[] = {"y", "w"};

// Whether perf_analyzer calls an object so: by the name of an output of the inference protocol, or
// by that of an input and "_STREAM_STEP".
bool IsNamedAfterTensor(absl::string_view name) {
  if (absl::c_linear_search(kOutputs, name)) return true;
  for (int number = 0; number < 2; ++number) {
    const size_t end = name.find_last_not_of("0123456789");
    if (end == name.npos || end + 1 == name.size() || name[end] != '_') return false;
    name = name.substr(0, end);
  }
  return absl::c_linear_search(kInputs, name);
}

absl::Status Unusable(absl::string_view field, absl::string_view reason) {
  return wire::FieldError(field, absl::StrCat("a range that cannot be used: ", reason),
                          "one within a regular shared-memory object that the server may open");
}

// The reason why openat failed. A caller must not learn whether an object exists that the server
// may not open.
std::string ReasonOfOpen(int error) {
  switch (error) {
    case ENOENT:
    case EACCES:
    case EPERM:
      return absl::StrCat("the object does not exist, or the server's user ", geteuid(),
                          " has no permission to open it");
    case ELOOP:
    case ENXIO:
    case EISDIR:
      return "it is not a regular file";
    case EWOULDBLOCK:
      return "another process has a lease on it";
    default:
      return strerror(error);
  }
}

absl::Status TooMany(absl::string_view field, int64_t max_open) {
  return absl::ResourceExhaustedError(
      absl::StrCat(field, ": got one more range, expected at most ", max_open,
                   " at once (max_shared_memory_ranges); try again later"));
}

// Why an open object is not to be used for bytes up to `end`; empty when it may be.
std::string WhyNot(int fd, int64_t end) {
  struct stat found = {};
  if (fstat(fd, &found) != 0) return strerror(errno);
  if (!S_ISREG(found.st_mode)) return "it is not a regular file";
  if (found.st_nlink > 1) return "the object has several names";
  if (end <= found.st_size) return "";
  return absl::StrCat("the object has ", found.st_size, " bytes and ends before byte ", end);
}

// Calls `transfer(done)` for what is left of `size` bytes until all are done. Returns 0, or errno
// when it fails, or -1 when it stops short.
template <typename F>
int TransferAll(int64_t size, F transfer) {
  for (int64_t done = 0; done < size;) {
    const ssize_t moved = transfer(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : -1;
    done += moved;
  }
  return 0;
}

}  // namespace

absl::Status CheckSharedMemoryPrefix(absl::string_view prefix) {
  if (!prefix.empty() && IsPlain(prefix) && !absl::StartsWith(prefix, ".") &&
      prefix.size() <= kMaxPrefixBytes) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "got \"", obs::LogText(prefix), "\", expected at most ", kMaxPrefixBytes,
      " letters, digits, '.', '_' and '-', not beginning with '.', for example awqd-"));
}

absl::Status SharedRange::Refuse(absl::string_view reason) const {
  obs::LogEvent(obs::LogLevel::kDebug, "shared memory refused",
                {{"field", field_}, {"reason", reason}});
  return Unusable(field_, reason);
}

absl::Status SharedRange::Read(char* out) const {
  if (on_device()) return region_->Copy({out, mapped_.data(), size_}, waits_for_.get());
  if (mapped()) {
    std::memcpy(out, mapped_.data(), static_cast<size_t>(size_));
    return absl::OkStatus();
  }
  const int error = TransferAll(size_, [&](int64_t done) {
    return pread(fd_.get(), out + done, static_cast<size_t>(size_ - done), offset_ + done);
  });
  if (error == 0) return absl::OkStatus();
  return Refuse(error < 0 ? "the object became shorter" : strerror(error));
}

absl::Status SharedRange::Write(absl::string_view bytes) const {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size > size_) return absl::InternalError("more bytes than the range has");
  if (on_device()) return region_->Copy({mapped_.data(), bytes.data(), size});
  if (mapped()) {
    std::memcpy(mapped_.data(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  const int error = TransferAll(size, [&](int64_t done) {
    return pwrite(fd_.get(), bytes.data() + done, static_cast<size_t>(size - done), offset_ + done);
  });
  switch (error) {
    case 0:
      return absl::OkStatus();
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
      return absl::ResourceExhaustedError(
          absl::StrCat(field_, ": ", kDirectory, " has no room for an answer of ", size,
                       " bytes; try again later, or allocate the object with posix_fallocate"));
    default:
      return Refuse(error < 0 ? "it takes no bytes" : strerror(error));
  }
}

SharedMemory::SharedMemory(SharedMemoryOptions options, UniqueFd directory)
    : options_(std::move(options)),
      directory_(std::move(directory)),
      writers_("shared-memory writes", on() ? kWriters : 0, options_.max_open) {}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(
    const SharedMemoryOptions& options) {
  UniqueFd directory;
  if (!options.prefixes.empty()) {
    directory = UniqueFd(open(kDirectory, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!directory.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--shared_memory_prefix: cannot open ", kDirectory, ": ", strerror(errno)));
    }
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(options, std::move(directory)));
}

// Checks all that the request alone shows. Its errors may say what is wrong.
absl::Status SharedMemory::CheckRange(const v1::SharedMemory& range,
                                      absl::string_view field) const {
  if (!on()) {
    return absl::UnimplementedError(absl::StrCat(
        field,
        ": this server takes no tensors in shared memory: it runs without --shared_memory_prefix"));
  }
  const bool allowed = IsNamedAfterTensor(range.name()) ||
                       absl::c_any_of(options_.prefixes, [&](const std::string& prefix) {
                         return absl::StartsWith(range.name(), prefix);
                       });
  if (!allowed || !IsPlain(range.name()) || range.name().size() > kMaxNameBytes) {
    return wire::FieldError(absl::StrCat(field, ".name"), "a name that is not allowed",
                            absl::StrCat("\"", absl::StrJoin(options_.prefixes, "\" or \""),
                                         "\" followed by letters, digits, '.', '_' and '-'; at ",
                                         "most ", kMaxNameBytes, " bytes"));
  }
  int64_t end = 0;
  if (range.offset() < 0 || range.size() < 0 ||
      __builtin_add_overflow(range.offset(), range.size(), &end)) {
    return wire::FieldError(field,
                            absl::StrCat("offset ", range.offset(), " and size ", range.size()),
                            "neither negative, and a sum below 2^63");
  }
  return absl::OkStatus();
}

absl::StatusOr<SharedRange> SharedMemory::Open(const v1::SharedMemory& range, Access access,
                                               absl::string_view field) {
  AWQD_RETURN_IF_ERROR(CheckRange(range, field));
  SharedRange opened;
  opened.field_ = std::string(field);
  opened.offset_ = range.offset();
  opened.size_ = range.size();
  opened.slot_.reset(&open_);
  if (open_.fetch_add(1) >= options_.max_open) return TooMany(field, options_.max_open);
  // O_NONBLOCK: a FIFO, or a lease that somebody holds on the object, must not keep us waiting.
  const int mode = access == Access::kRead ? O_RDONLY : O_WRONLY;
  const int fd = openat(directory_.get(), range.name().c_str(),
                        mode | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) return TooMany(field, options_.max_open);
  if (fd < 0) return opened.Refuse(ReasonOfOpen(errno));
  opened.fd_ = UniqueFd(fd);
  const std::string why = WhyNot(fd, range.offset() + range.size());
  if (!why.empty()) return opened.Refuse(why);
  return opened;
}

std::optional<SharedMemory::ObjectId> SharedMemory::Identify(const std::string& name) const {
  struct stat found = {};
  if (fstatat(directory_.get(), name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
    return std::nullopt;
  }
  return ObjectId(found.st_dev, found.st_ino);
}

void SharedMemory::Write(SharedRange range, engine::Payload result,
                         std::function<void(const absl::Status&)> done) {
  const bool here = range.mapped() || result.size() < kWriteElsewhereBytes;
  const std::function<void()> job = [range = std::make_shared<SharedRange>(std::move(range)),
                                     result = std::move(result), done = std::move(done)] {
    const absl::Status status = range->Write(result.view());
    *range = SharedRange();  // closed by the time that the client hears of it
    done(status);
  };
  // Also here when so many wait that it would take longer there.
  if (here || !writers_.Run(job).ok()) job();
}

}  // namespace awqd::services
