// Leases of libawqd against a lender of this process that may lie: the bits of own weights, every lie
// refused by its words, and nothing mapped or open afterwards.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/unique_fd.h"
#include "kernels/kernels.h"
#include "kernels/lending/arena.h"
#include "kernels/lending/manifest.h"
#include "kernels/library/awqd.h"
#include "kernels/library/objects.h"
#include "tests/testing/borrower.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using lending::LeaseAnswer, lending::LeaseRequest, lending::Manifest;
using ::testing::AllOf, ::testing::HasSubstr;

constexpr int64_t kK = 256, kN = 192, kTokens = 5;

int CountMappings() { return static_cast<int>(testing::FindMappings().size()); }

int64_t CountOpenFiles() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

// Lends three weights, and says of them what a test wants.
class LeaseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(awqd_device_open("cpu", nullptr, &device_), AWQD_OK) << awqd_error_message();
    const std::vector<testing::WeightSpec> specs = {
        {.k = kK, .n = kN, .bias = true},
        {.k = kK, .n = kN, .scheme = Symmetric(8, 0), .order = true, .factor = true, .seed = 2},
        {.k = kK, .n = kN, .scheme = Vectors(VectorCode::kIq3S), .seed = 3}};
    int64_t bytes = 0;
    for (const testing::WeightSpec& spec : specs) {
      host_.push_back(testing::RandomWeight(spec));
      bytes += PreparedBytes(host_.back(), device_->device->info()).value().most;
    }
    arena_ = WeightArena::Create(*device_->device, bytes).value();
    memory_ = UniqueFd(dup(arena_->descriptor()));
    manifest_ = {.awqd_version = AWQD_VERSION,
                 .layouts = lending::LayoutsDigest(),
                 .model_version = 3,
                 .memory_bytes = arena_->bytes()};
    for (size_t i = 0; i < host_.size(); ++i) {
      own_.push_back(PrepareWeightIn(*arena_, host_[i], *device_->device).value());
      manifest_.weights.push_back(
          lending::Describe(absl::StrCat("layer.", i), *own_.back(), *arena_));
    }
    Listen();
  }
  void TearDown() override {
    stopping_ = true;
    shutdown(listening_.get(), SHUT_RDWR);
    thread_.join();
    own_.clear();
    arena_ = nullptr;
    awqd_device_close(device_);
    std::filesystem::remove(path_);
  }

  int Open(awqd_lease** lease) {
    return awqd_lease_open(device_, path_.c_str(), "m", "secret", lease);
  }
  // Asks for a lease that is refused with these words; nothing of it is left.
  void ExpectRefused(int code, const ::testing::Matcher<std::string>& message) {
    while (connections_open_ > 0) std::this_thread::yield();
    const int mappings = CountMappings();
    const int64_t files = CountOpenFiles();
    awqd_lease* lease = nullptr;
    EXPECT_EQ(Open(&lease), code) << awqd_error_message();
    EXPECT_THAT(awqd_error_message(), message);
    EXPECT_EQ(lease, nullptr);
    EXPECT_EQ(CountMappings(), mappings);
    while (connections_open_ > 0) std::this_thread::yield();
    EXPECT_EQ(CountOpenFiles(), files);
  }

  std::vector<float> Multiply(const awqd_weight* weight) {
    std::vector<uint8_t> x = testing::RandomMatrix(kTokens, kK, DType::kFp16, 9);
    std::vector<float> y(kTokens * kN);
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = kTokens, args.x = x.data(), args.y = y.data();
    args.x_dtype = AWQD_FP16, args.y_dtype = AWQD_FP32;
    testing::MultiplyOnCpu(weight, args);
    return y;
  }

  awqd_device* device_ = nullptr;
  std::vector<HostWeight> host_;
  std::shared_ptr<WeightArena> arena_;
  std::vector<std::shared_ptr<const DeviceWeight>> own_;
  // The answer.
  Manifest manifest_;
  UniqueFd memory_;
  LeaseAnswer answer_;
  std::string text_;
  std::function<void(std::string*)> spoil_ = [](std::string*) {};  // the printed manifest
  std::optional<int64_t> manifest_bytes_;                          // that are claimed
  bool with_descriptors_ = true;
  std::string asked_;  // the last request's texts

 private:
  void Listen() {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    unlink(path_.c_str());
    listening_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM, 0));
    ASSERT_EQ(bind(listening_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listening_.get(), 8), 0);
    thread_ = std::thread([this] {
      while (!stopping_) {
        UniqueFd socket(accept(listening_.get(), nullptr, nullptr));
        if (!socket.ok()) continue;
        connections_open_ = 1;
        Answer(socket.get());
        char end;
        (void)recv(socket.get(), &end, 1, 0);  // the borrower's end
        socket.Reset();
        connections_open_ = 0;
      }
    });
  }
  void Answer(int socket) {
    std::string bytes(16 << 10, '\0');
    const ssize_t got = recv(socket, bytes.data(), bytes.size(), 0);
    if (got < static_cast<ssize_t>(sizeof(LeaseRequest))) return;
    asked_ = bytes.substr(sizeof(LeaseRequest), got - sizeof(LeaseRequest));
    std::string printed = lending::Print(manifest_);
    spoil_(&printed);
    const UniqueFd file(memfd_create("manifest", 0));
    (void)!write(file.get(), printed.data(), printed.size());
    LeaseAnswer answer = answer_;
    answer.manifest_bytes = manifest_bytes_.value_or(printed.size());
    answer.text_bytes = static_cast<uint32_t>(text_.size());
    iovec parts[2] = {{&answer, sizeof(answer)}, {text_.data(), text_.size()}};
    const int fds[2] = {file.get(), memory_.get()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (with_descriptors_) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(fds));
      std::memcpy(CMSG_DATA(header), fds, sizeof(fds));
    }
    sendmsg(socket, &message, MSG_NOSIGNAL);
  }

  std::string path_ = absl::StrCat(::testing::TempDir(), "/lease-", getpid(), ".sock");
  UniqueFd listening_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> connections_open_{0};
  std::thread thread_;
};

TEST_F(LeaseTest, TheBitsOfOwnWeights) {
  awqd_lease* lease = nullptr;
  ASSERT_EQ(Open(&lease), AWQD_OK) << awqd_error_message();
  EXPECT_EQ(asked_, "mBearer secret");
  EXPECT_EQ(awqd_lease_model_version(lease), 3);
  ASSERT_EQ(awqd_lease_linears(lease), host_.size());
  EXPECT_EQ(awqd_lease_linear(lease, host_.size()), nullptr);
  std::vector<awqd_weight*> weights(host_.size());
  for (size_t i = 0; i < host_.size(); ++i) {
    ASSERT_EQ(awqd_lease_weight(lease, awqd_lease_linear(lease, i), &weights[i]), AWQD_OK);
  }
  EXPECT_EQ(awqd_lease_weight(lease, "layer.9", &weights[0]), AWQD_NOT_FOUND);
  EXPECT_THAT(awqd_error_message(), HasSubstr("\"layer.9\": not in the lease of \"m\""));
  EXPECT_EQ(CountMappings(), 2) << "the lender's and the borrower's";
  awqd_lease_close(lease);
  for (size_t i = 0; i < host_.size(); ++i) {
    const awqd_weight own = {device_->device, own_[i], ""};
    EXPECT_EQ(Multiply(weights[i]), Multiply(&own)) << "layer." << i;
    awqd_weight_info info = AWQD_INIT(info);
    ASSERT_EQ(awqd_weight_describe(weights[i], &info), AWQD_OK);
    EXPECT_EQ(info.scheme, ToString(host_[i].scheme));
    EXPECT_EQ(info.has_bias, i == 0);
    EXPECT_EQ(info.transforms_input, i == 1);
    awqd_weight_free(weights[i]);
  }
  EXPECT_EQ(CountMappings(), 1) << "the lender's";
}

TEST_F(LeaseTest, VersionsThatDiffer) {
  manifest_.awqd_version = "0.0.9";
  ExpectRefused(
      AWQD_FAILED_PRECONDITION,
      AllOf(HasSubstr("got awqd 0.0.9"), HasSubstr(absl::StrCat("expected ", AWQD_VERSION))));
  manifest_.awqd_version = AWQD_VERSION;
  manifest_.layouts = 0xabc;
  ExpectRefused(AWQD_FAILED_PRECONDITION, HasSubstr("layouts 0000000000000abc), expected"));
  manifest_.layouts = lending::LayoutsDigest();
  spoil_ = [](std::string* text) { (*text)[4] = 9; };
  ExpectRefused(AWQD_FAILED_PRECONDITION, HasSubstr("(manifest 9,"));
  answer_.protocol = 7;
  ExpectRefused(AWQD_FAILED_PRECONDITION, HasSubstr("got protocol 7, expected 1"));
}

TEST_F(LeaseTest, ManifestsThatLie) {
  struct Lie {
    std::function<void(Manifest*)> tell;
    std::string message;
    int code = AWQD_INVALID_ARGUMENT;
  };
  const std::vector<Lie> lies = {
      {[](Manifest* m) { m->weights[0].layout = "other"; }, "layout: got \"other\", expected",
       AWQD_FAILED_PRECONDITION},
      {[](Manifest* m) { m->weights[0].shape.k = m->weights[0].whole_k = 512; }, "bytes: got"},
      {[](Manifest* m) { m->weights[0].shape.n = int64_t{1} << 40; }, "n: got 1099511627776"},
      {[](Manifest* m) { m->weights[0].shape.k = -1; }, "k: got -1"},
      {[](Manifest* m) { m->weights[2].shape.k = 250; }, "K (in features): got 250"},
      {[](Manifest* m) { m->weights[0].shape.scheme = Symmetric(3, 128); }, "bytes: got"},
      {[](Manifest* m) { m->weights[0].shape.scale_octaves = 600; }, "scale_octaves: got 600"},
      {[](Manifest* m) { m->weights[0].order = true; }, "bytes: got"},
      {[](Manifest* m) { m->weights[1].factor = false; }, "bytes: got"},
      {[](Manifest* m) { m->weights[0].bias = false; }, "bytes: got"},
      {[](Manifest* m) {
         m->weights[0].hadamard = {96, 1};
       },
       "hadamard_size: got 96"},
      {[](Manifest* m) { m->weights[0].activations.how = ActivationQuantization(9); },
       "activations: got 9"},
      {[](Manifest* m) { m->weights[0].offset = 128; }, "offset: got 128, expected a multiple"},
      {[](Manifest* m) { m->weights[0].offset = -256; }, "offset: got -256"},
      {[](Manifest* m) { m->weights[2].offset = m->memory_bytes; }, "offset: got"},
      {[](Manifest* m) { m->weights[0].bytes = m->memory_bytes + 1; }, "bytes: got"},
      {[](Manifest* m) { m->weights[1].offset = m->weights[0].offset; },
       "got the memory of \"layer.0\", expected one of its own"},
      {[](Manifest* m) { m->weights[1].path = "layer.0"; }, "got the path of \"layer.0\""},
      {[](Manifest* m) { m->weights[0].whole_k = 1; }, "whole_k: got 1, expected 256 to"},
      {[](Manifest* m) { m->weights[0].whole_n = -1; }, "whole_n: got -1"},
      {[](Manifest* m) { m->weights[0].row_begin = 1; }, "row_begin: got 1, expected 0 to 0"},
      {[](Manifest* m) { m->weights[0].col_begin = -8; }, "col_begin: got -8"},
      {[](Manifest* m) { m->memory_bytes += 4096; }, "memory: got"},
      {[](Manifest* m) { m->memory_bytes = 0; }, "memory_bytes: got 0"},
  };
  const Manifest truth = manifest_;
  for (const Lie& lie : lies) {
    SCOPED_TRACE(lie.message);
    manifest_ = truth;
    lie.tell(&manifest_);
    ExpectRefused(lie.code, HasSubstr(lie.message));
  }
}

TEST_F(LeaseTest, ManifestsThatAreCut) {
  const size_t bytes = lending::Print(manifest_).size();
  for (size_t size = 0; size < bytes; size += 7) {
    spoil_ = [size](std::string* text) { text->resize(size); };
    ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("manifest: got"));
  }
  // Any byte of a number or a text may be another one: refused, or as harmless as the truth.
  for (size_t at = 0; at < bytes; ++at) {
    spoil_ = [at](std::string* text) { (*text)[at] = static_cast<char>((*text)[at] ^ 0x55); };
    awqd_lease* lease = nullptr;
    const int code = Open(&lease);
    EXPECT_EQ(code == AWQD_OK, lease != nullptr && awqd_lease_linears(lease) == host_.size());
    awqd_lease_close(lease);
  }
  spoil_ = [](std::string*) {};
  manifest_bytes_ = int64_t{1} << 50;
  ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("manifest: got 1125899906842624 bytes"));
  manifest_bytes_ = lending::kMaxManifestBytes;
  ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("expected 268435456"));
}

TEST_F(LeaseTest, ContentsAreChecked) {
  awqd_lease* lease = nullptr;
  ASSERT_EQ(Open(&lease), AWQD_OK) << awqd_error_message();
  EXPECT_EQ(awqd_lease_check(lease), AWQD_OK) << awqd_error_message();
  auto* const codes = static_cast<uint8_t*>(own_[2]->storage.data());
  const std::string truth = absl::StrFormat("%016x", manifest_.weights[2].digest);
  codes[own_[2]->bytes() - 1] ^= 1;  // the lender can write
  EXPECT_EQ(awqd_lease_check(lease), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(awqd_error_message(),
              AllOf(HasSubstr("weight \"layer.2\": digest: got "), HasSubstr("expected " + truth)));
  codes[own_[2]->bytes() - 1] ^= 1;
  EXPECT_EQ(awqd_lease_check(lease), AWQD_OK) << awqd_error_message();
  awqd_lease_close(lease);
  manifest_.weights[1].digest ^= 1;
  ASSERT_EQ(Open(&lease), AWQD_OK) << "not asked to check";
  EXPECT_EQ(awqd_lease_check(lease), AWQD_INVALID_ARGUMENT);
  EXPECT_THAT(
      awqd_error_message(),
      HasSubstr(absl::StrFormat("weight \"layer.1\": digest: got %016x, expected %016x",
                                manifest_.weights[1].digest ^ 1, manifest_.weights[1].digest)));
  awqd_lease_close(lease);
  EXPECT_EQ(awqd_lease_check(nullptr), AWQD_INVALID_ARGUMENT);
}

TEST_F(LeaseTest, AnOrderThatIsNone) {
  const int32_t* const order = own_[1]->order();
  const_cast<int32_t*>(order)[7] = 1 << 30;  // the lender can write
  ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("weight \"layer.1\": order: got 1073741824"));
}

TEST_F(LeaseTest, MemoryThatCouldGo) {
  memory_ = UniqueFd(memfd_create("unsealed", MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(memory_.get(), arena_->bytes()), 0);
  ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("memory: got a file whose size can change"));
  memory_ = UniqueFd(open("/dev/null", O_RDONLY));
  ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("memory: got a file whose size can change"));
}

TEST_F(LeaseTest, AnswersThatAreNone) {
  with_descriptors_ = false;
  ExpectRefused(AWQD_INVALID_ARGUMENT, HasSubstr("got 0 descriptors, expected 2"));
  with_descriptors_ = true;
  answer_.magic = 1;
  ExpectRefused(AWQD_UNAVAILABLE, HasSubstr("what answers lends no weights"));
  answer_ = {.code = AWQD_PERMISSION_DENIED};
  text_ = "needs the role attach\n\x1b[2J";
  ExpectRefused(AWQD_PERMISSION_DENIED, HasSubstr("needs the role attach\\n\\x1b[2J"));
  answer_.code = 4711;
  ExpectRefused(2, HasSubstr("needs the role attach"));
  text_.assign(lending::kMaxTextBytes + 1, 'x');
  ExpectRefused(AWQD_UNAVAILABLE, HasSubstr("a text of 4097 bytes"));
}

TEST_F(LeaseTest, Arguments) {
  awqd_lease* lease = nullptr;
  EXPECT_EQ(awqd_lease_open(device_, "/nowhere", "m", nullptr, &lease), AWQD_UNAVAILABLE);
  EXPECT_THAT(awqd_error_message(), HasSubstr("lender at \"/nowhere\": connect: No such file"));
  EXPECT_EQ(awqd_lease_open(device_, nullptr, "m", nullptr, &lease), AWQD_INVALID_ARGUMENT);
  EXPECT_EQ(awqd_lease_open(device_, std::string(200, 'p').c_str(), "m", nullptr, &lease),
            AWQD_INVALID_ARGUMENT);
  EXPECT_EQ(awqd_lease_open(device_, "/p", std::string(200, 'm').c_str(), nullptr, &lease),
            AWQD_INVALID_ARGUMENT);
  awqd_lease_close(nullptr);
}

// --- The arena ---

TEST_F(LeaseTest, NobodyElseWrites) {
  const int fd = arena_->descriptor();
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  void* const mapped = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_NE(mprotect(mapped, 4096, PROT_READ | PROT_WRITE), 0);
  munmap(mapped, 4096);
  EXPECT_LT(pwrite(fd, "x", 1, 0), 0);
  EXPECT_NE(ftruncate(fd, 0), 0);
}

TEST_F(LeaseTest, TheArenaIsBoundedAndCounted) {
  Device& device = *device_->device;
  const int64_t before = device.UsedBytes();
  auto arena = WeightArena::Create(device, 1000).value();
  EXPECT_EQ(device.UsedBytes(), before + arena->bytes());
  Buffer part = arena->Allocate(arena->bytes() - 255).value();
  EXPECT_THAT(std::string(arena->Allocate(1).status().message()),
              HasSubstr("asked for 1 bytes, 0 of"));
  arena = nullptr;
  EXPECT_GT(device.UsedBytes(), before) << "the buffer keeps it";
  part.Reset();
  EXPECT_EQ(device.UsedBytes(), before);
  device.SetBudget(before + 4096);
  EXPECT_EQ(WeightArena::Create(device, 1 << 20).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device.UsedBytes(), before);
}

}  // namespace
}  // namespace awqd
