// The lender's socket with borrowers of libawqd: bits through reload, unload and the lender's end;
// roles, bounds, requests that are none; and a borrower that stores or is killed.
#include "server/lending/lend_server.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "kernels/lending/manifest.h"
#include "kernels/library/awqd.h"
#include "kernels/library/objects.h"
#include "server/security/identities.h"
#include "tests/server/repository/model_store_fixture.h"
#include "tests/testing/borrower.h"
#include "tests/testing/eventually.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::lending {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 3, kK = 64, kN = 128;
constexpr char kUp[] = "layers.0.up";

using awqd::testing::FindMappings;

std::vector<float> Multiply(const awqd_weight* weight) {
  std::vector<float> x(kTokens * kK), y(kTokens * kN);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) - 8;
  awqd_matmul_args args = AWQD_INIT(args);
  args.m = kTokens, args.x = x.data(), args.y = y.data();
  args.x_dtype = args.y_dtype = AWQD_FP32;
  awqd::testing::MultiplyOnCpu(weight, args);
  return y;
}

// A lease of a model, and a weight of it.
class Borrower : public awqd::testing::Borrower {
 public:
  explicit Borrower(const std::string& path, const char* model = "m", const char* token = nullptr)
      : awqd::testing::Borrower(path, kUp, model, token) {}

  std::vector<float> Product() const { return Multiply(weight()); }
};

class LendServerTest : public repository::ModelStoreTest {
 protected:
  void SetUp() override {
    ModelStoreTest::SetUp();
    store_->set_lend(true);
    ASSERT_TRUE(store_->Load("m").ok());
    StartLender();
  }
  void StartLender() {
    lender_ = std::make_unique<LendServer>(store_.get(), access_.get(), &starting_);
    ASSERT_TRUE(lender_->Start(path_, 0600, absl::Milliseconds(300)).ok());
  }
  // By the server's own weight.
  std::vector<float> OwnProduct() const {
    const auto placed = store_->FindWeight("m", kUp).value();
    const awqd_weight own = {{device_.get(), [](Device*) {}}, placed->parts[0].weight, ""};
    return Multiply(&own);
  }
  // The answer to these bytes: a code, or -1 where the connection is closed without.
  int Answer(const std::string& request) const {
    const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    LeaseAnswer answer;
    const ssize_t got = recv(socket.get(), &answer, sizeof(answer), MSG_WAITALL);
    return got == sizeof(answer) ? static_cast<int>(answer.code) : -1;
  }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "/lend-", getpid(), ".sock");
  std::unique_ptr<security::Access> access_ =
      std::make_unique<security::Access>(security::Options());
  std::atomic<bool> starting_{false};
  std::unique_ptr<LendServer> lender_;
};

TEST_F(LendServerTest, ReloadUnloadAndTheEndChangeNothingThatIsMapped) {
  const std::vector<float> first = OwnProduct();
  EXPECT_EQ(FindMappings().size(), 1u);
  auto borrower = std::make_unique<Borrower>("unix:" + path_);
  ASSERT_EQ(borrower->code(), AWQD_OK) << borrower->error();
  EXPECT_EQ(borrower->version(), 1);
  EXPECT_EQ(borrower->Product(), first);
  EXPECT_EQ(FindMappings().size(), 2u);
  WriteModel("m", 0x43);
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_NE(OwnProduct(), first);
  EXPECT_EQ(borrower->Product(), first);
  // The lender drops the first version, if not before it has logged the lease.
  EXPECT_TRUE(Eventually([] { return FindMappings().size() == 2; }));
  const Borrower second(path_, "");
  ASSERT_EQ(second.code(), AWQD_OK) << second.error();
  EXPECT_EQ(second.version(), 2);
  EXPECT_EQ(second.Product(), OwnProduct());
  EXPECT_EQ(lender_->leases("m"), 2);
  const std::vector<float> last = OwnProduct();
  ASSERT_TRUE(store_->Unload("m").ok());
  EXPECT_TRUE(Eventually([&] { return device_->UsedBytes() == 0; }));
  EXPECT_EQ(Borrower(path_).code(), AWQD_NOT_FOUND);
  EXPECT_EQ(lender_->leases("m"), 2) << "an unloaded model's too";
  borrower = nullptr;
  EXPECT_TRUE(Eventually([&] { return lender_->leases("m") == 1; }));
  lender_ = nullptr;
  EXPECT_EQ(second.Product(), last);
  EXPECT_EQ(FindMappings().size(), 1u);
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(LendServerTest, ABorrowerThatStoresDiesAlone) {
  const std::vector<float> expected = OwnProduct();
  const uintptr_t own = FindMappings()[0];
  const Borrower borrower(path_);
  ASSERT_EQ(borrower.code(), AWQD_OK) << borrower.error();
  for (const uintptr_t at : FindMappings()) {
    if (at == own) continue;
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      signal(SIGSEGV, SIG_DFL);
      mprotect(reinterpret_cast<void*>(at), 4096, PROT_READ | PROT_WRITE);
      *reinterpret_cast<volatile char*>(at) = 1;
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  }
  EXPECT_EQ(OwnProduct(), expected);
  EXPECT_EQ(borrower.Product(), expected);
}

TEST_F(LendServerTest, ABorrowerThatIsKilledIsCountedNoMore) {
  auto borrower = std::make_unique<Borrower>(path_);
  ASSERT_EQ(borrower->code(), AWQD_OK) << borrower->error();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (;;) pause();  // it has the lease, and nothing else is called in it
  }
  borrower = nullptr;
  EXPECT_EQ(Borrower(path_).code(), AWQD_OK) << "the lender has seen every earlier event";
  EXPECT_TRUE(Eventually([&] { return lender_->leases("m") == 1; }));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(Eventually([&] { return lender_->leases("m") == 0; }));
}

TEST_F(LendServerTest, TheRoleIsAsked) {
  security::Options options;
  options.tokens = absl::StrCat(::testing::TempDir(), "/lend-tokens-", getpid());
  const auto line = [](const std::string& name, const std::string& roles) {
    const security::Digest digest = security::Sha256(name + "-token");
    return absl::StrCat(
        name, " ", roles, " sha256:",
        absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()}),
        "\n");
  };
  std::ofstream(options.tokens) << line("bo", "attach") << line("ian", "infer,read,admin");
  lender_ = nullptr;
  access_ = security::Access::Create(options).value();
  StartLender();
  const absl::Time before = absl::Now();
  {
    const Borrower bo(path_, "m", "bo-token");
    ASSERT_EQ(bo.code(), AWQD_OK) << bo.error();
    const auto leases = lender_->statistics().leases;
    ASSERT_EQ(leases.size(), 1u);
    EXPECT_EQ(leases[0].model, "m");
    EXPECT_EQ(leases[0].device, "cpu");
    EXPECT_EQ(leases[0].version, 1);
    EXPECT_EQ(leases[0].bytes, device_->UsedBytes());
    EXPECT_EQ(leases[0].client, absl::StrCat("bo, user ", getuid(), ", process ", getpid()));
    EXPECT_GE(leases[0].since, before);
  }
  EXPECT_TRUE(Eventually([&] { return lender_->statistics().leases.empty(); }));
  const Borrower refused(path_, "m", "ian-token");
  EXPECT_EQ(refused.code(), AWQD_PERMISSION_DENIED);
  EXPECT_THAT(refused.error(), HasSubstr("needs the role attach; \"ian\" has infer,read,admin"));
  EXPECT_EQ(Borrower(path_).code(), AWQD_UNAUTHENTICATED);
  EXPECT_EQ(Borrower(path_, "m", "guessed").code(), AWQD_UNAUTHENTICATED);
  EXPECT_EQ(lender_->statistics().refused, 3);
  std::remove(options.tokens.c_str());
}

TEST_F(LendServerTest, NamesOfNothing) {
  const Borrower other(path_, "other");
  EXPECT_EQ(other.code(), AWQD_NOT_FOUND);
  EXPECT_THAT(other.error(), HasSubstr("model \"other\": no such model is loaded"));
  EXPECT_EQ(Borrower(path_, "../m").code(), AWQD_INVALID_ARGUMENT);
  starting_ = true;
  EXPECT_EQ(Borrower(path_, "other").code(), AWQD_UNAVAILABLE);
  WriteModel("n");
  ASSERT_TRUE(store_->Load("n").ok());
  EXPECT_EQ(Borrower(path_, "").code(), AWQD_INVALID_ARGUMENT) << "of two";
}

TEST_F(LendServerTest, RequestsThatAreNone) {
  const auto print = [](const LeaseRequest& request) {
    return std::string(reinterpret_cast<const char*>(&request), sizeof(request));
  };
  LeaseRequest good;
  std::strcpy(good.device, "cpu");
  good.model_bytes = 1;
  EXPECT_EQ(Answer(print(good) + "m"), AWQD_OK);
  EXPECT_EQ(Answer(print(good) + "mm"), AWQD_INVALID_ARGUMENT);
  LeaseRequest bad = good;
  bad.protocol = 2;
  EXPECT_EQ(Answer(print(bad)), AWQD_FAILED_PRECONDITION);
  bad = good;
  bad.model_bytes = 0xffffffff;
  EXPECT_EQ(Answer(print(bad)), AWQD_INVALID_ARGUMENT);
  bad = good;
  bad.token_bytes = lending::kMaxTokenBytes + 1;
  EXPECT_EQ(Answer(print(bad)), AWQD_INVALID_ARGUMENT);
  bad = good;
  std::memset(bad.device, 'x', sizeof(bad.device));
  EXPECT_EQ(Answer(print(bad) + "m"), AWQD_FAILED_PRECONDITION);
  EXPECT_EQ(Answer("GET / HTTP/1.1\r\n" + std::string(100, 'x')), AWQD_FAILED_PRECONDITION);
  EXPECT_EQ(Answer(print(good)), -1) << "closed: the rest did not come in time";
  EXPECT_EQ(Answer(""), -1);
  EXPECT_TRUE(Eventually([&] { return lender_->leases("m") == 0; }));
}

TEST_F(LendServerTest, LeasesAreBounded) {
  std::vector<std::unique_ptr<Borrower>> borrowers;
  for (size_t i = 0; i <= LendServer::kMaxConnectionsOfUser; ++i) {
    borrowers.push_back(std::make_unique<Borrower>(path_));
  }
  EXPECT_EQ(borrowers.back()->code(), AWQD_RESOURCE_EXHAUSTED);
  EXPECT_THAT(borrowers.back()->error(), HasSubstr("expected at most 256 and 512"));
  borrowers.pop_back();
  EXPECT_EQ(borrowers.back()->code(), AWQD_OK) << borrowers.back()->error();
  EXPECT_EQ(lender_->leases("m"), 256);
  EXPECT_EQ(lender_->statistics().leases.size(), 256u);
  borrowers.clear();
  EXPECT_TRUE(Eventually([&] { return lender_->leases("m") == 0; }));
  EXPECT_EQ(Borrower(path_).code(), AWQD_OK);
  EXPECT_EQ(FindMappings().size(), 1u);
}

// A gated MLP in two parts, each on a device that a request names by a PCI bus id. The products of both
// parts make the product of the whole: columns of gate beside each other, rows of down added up.
TEST_F(LendServerTest, PartsOfWeightsAreLentByDevice) {
  constexpr char kGate[] = "mlp.gate_proj", kDown[] = "mlp.down_proj";
  using awqd::testing::AwqLinear, awqd::testing::Merge;
  awqd::testing::TestTensors tensors =
      Merge(Merge(AwqLinear(kGate, 64, 256, 32), AwqLinear("mlp.up_proj", 64, 256, 32)),
            AwqLinear(kDown, 256, 64, 32));
  for (const char* const path : {kGate, kDown}) {
    std::string& codes = tensors[absl::StrCat(path, ".qweight")].bytes;
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<char>(i * i / 7);
  }
  directory_.Write("tp/config.json", awqd::testing::AwqConfig());
  directory_.Write("tp/model.safetensors", awqd::testing::SafetensorsOf(tensors));
  std::vector<std::shared_ptr<Device>> devices;
  for (const char* const bus : {"0000:01:00.0", "0000:02:00.0"}) {
    auto device = std::make_shared<awqd::testing::WrappedDevice>(
        OpenDevice("cpu", {.cpu_threads = 1}).value(), devices.empty());  // one as a GPU is
    DeviceInfo info = device->info();
    info.pci_bus_id = bus;
    device->Pretend(info);
    devices.push_back(std::move(device));
  }
  lender_ = nullptr;
  const auto whole = store_->Load("tp").value();
  repository::ModelStore parted(directory_.path(), {devices[0].get(), devices[1].get()},
                                model::Sharding::kColumns);
  parted.set_lend(true);
  ASSERT_TRUE(parted.Load("tp").ok());
  LendServer lender(&parted, access_.get(), &starting_);
  ASSERT_TRUE(lender.Start(path_, 0600, absl::Seconds(5)).ok());

  const auto multiply = [](const awqd_weight* weight, const std::vector<float>& x) {
    std::vector<float> y(weight->weight->shape.n);
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = 1, args.x = x.data(), args.y = y.data();
    args.x_dtype = args.y_dtype = AWQD_FP32;
    awqd::testing::MultiplyOnCpu(weight, args);
    return y;
  };
  std::vector<float> x(256);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 5) - 2;
  const std::vector<float> narrow(x.begin(), x.begin() + 64);
  std::vector<float> gate, down(64);
  for (size_t i = 0; i < devices.size(); ++i) {
    awqd_device device = {devices[i]};
    awqd_lease* lease = nullptr;
    ASSERT_EQ(awqd_lease_open(&device, path_.c_str(), "tp", nullptr, &lease), AWQD_OK)
        << awqd_error_message();
    EXPECT_EQ(awqd_lease_check(lease), AWQD_OK) << awqd_error_message();
    ASSERT_EQ(awqd_lease_linears(lease), 3u);
    const auto begin = static_cast<int64_t>(128 * i);
    awqd_part part = AWQD_INIT(part);
    awqd_weight* weight = nullptr;
    ASSERT_EQ(awqd_lease_part(lease, kGate, &part), AWQD_OK) << awqd_error_message();
    EXPECT_THAT((std::vector<int64_t>{part.k, part.n, part.row_begin, part.col_begin}),
                ::testing::ElementsAre(64, 256, 0, begin));
    ASSERT_EQ(awqd_lease_weight(lease, kGate, &weight), AWQD_OK) << awqd_error_message();
    for (const float one : multiply(weight, narrow)) gate.push_back(one);
    awqd_weight_free(weight);
    ASSERT_EQ(awqd_lease_part(lease, kDown, &part), AWQD_OK) << awqd_error_message();
    EXPECT_THAT((std::vector<int64_t>{part.k, part.n, part.row_begin, part.col_begin}),
                ::testing::ElementsAre(256, 64, begin, 0));
    ASSERT_EQ(awqd_lease_weight(lease, kDown, &weight), AWQD_OK) << awqd_error_message();
    const auto sums = multiply(weight, {x.begin() + begin, x.begin() + begin + 128});
    for (size_t n = 0; n < down.size(); ++n) down[n] += sums[n];
    awqd_weight_free(weight);
    EXPECT_EQ(awqd_lease_part(lease, "mlp.other", &part), AWQD_NOT_FOUND);
    part.size = 1;
    EXPECT_EQ(awqd_lease_part(lease, kGate, &part), AWQD_INVALID_ARGUMENT);
    awqd_lease_close(lease);
  }
  const auto own = [&](const char* path) {
    return awqd_weight{
        {device_.get(), [](Device*) {}}, whole->weights.at(path)->parts[0].weight, ""};
  };
  const awqd_weight whole_gate = own(kGate), whole_down = own(kDown);
  EXPECT_EQ(gate, multiply(&whole_gate, narrow));
  EXPECT_THAT(down, ::testing::Pointwise(::testing::FloatNear(1e-2), multiply(&whole_down, x)));
  awqd_lease* lease = nullptr;
  awqd_device other = {{device_.get(), [](Device*) {}}};
  EXPECT_EQ(awqd_lease_open(&other, path_.c_str(), "tp", nullptr, &lease),
            AWQD_FAILED_PRECONDITION);
  EXPECT_THAT(awqd_error_message(), HasSubstr("got device \"cpu\", expected 0000:0"));
}

TEST_F(LendServerTest, WithoutLendingNothingIsShared) {
  store_->set_lend(false);
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_TRUE(FindMappings().empty());
  EXPECT_EQ(Borrower(path_).code(), AWQD_FAILED_PRECONDITION);
}

}  // namespace
}  // namespace awqd::lending
