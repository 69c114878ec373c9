// Regions of shared memory: the table, and requests of the inference protocol that name them.
#include "server/services/memory/regions.h"

#include <signal.h>
#include <sys/wait.h>

#include <set>

#include "server/wire/status.h"
#include "tests/server/services/oip_fixture.h"
#include "tests/server/services/shared_object.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::services {
namespace {

using ::testing::HasSubstr;

constexpr RegionKind kSystem = RegionKind::kSystem;

v1::SharedMemory RangeOf(const std::string& region, int64_t offset, int64_t size) {
  v1::SharedMemory range;
  range.set_region(region);
  range.set_offset(offset);
  range.set_size(size);
  return range;
}

TEST(RegionsTest, EachOwnerHasItsOwn) {
  Regions regions(nullptr);
  ASSERT_TRUE(regions.Register("ann", {"r", "key-a", 0, 10}).ok());
  ASSERT_TRUE(regions.Register("bob", {"r", "key-b", 0, 20}).ok());
  EXPECT_EQ(regions.Register("ann", {"r", "key-c", 0, 10}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ((*regions.List("ann", "", kSystem))[0].key, "key-a");
  EXPECT_EQ((*regions.List("bob", "r", kSystem))[0].key, "key-b");
  EXPECT_EQ(regions.List("ann", "q", kSystem).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(regions.List("eve", "", kSystem)->empty());
  regions.Unregister("ann", "", kSystem);
  EXPECT_TRUE(regions.List("ann", "", kSystem)->empty());
  EXPECT_EQ(regions.List("bob", "", kSystem)->size(), 1u);
  regions.Unregister("bob", "other", kSystem);
  regions.Unregister("bob", "r", kSystem);
  EXPECT_TRUE(regions.List("bob", "", kSystem)->empty());
}

TEST(RegionsTest, AreBounded) {
  Regions regions(nullptr);
  for (size_t i = 0; i < Regions::kMaxRegions; ++i) {
    ASSERT_TRUE(regions.Register("ann", {std::to_string(i), "key", 0, 1}).ok());
  }
  EXPECT_EQ(regions.Register("ann", {"more", "key", 0, 1}).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(regions.Register("bob", {"more", "key", 0, 1}).ok());
  regions.Unregister("ann", "7", kSystem);
  EXPECT_TRUE(regions.Register("ann", {"more", "key", 0, 1}).ok());
  EXPECT_EQ(regions.Register("bob", {"", "key", 0, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(regions.Register("bob", {std::string(129, 'n'), "key", 0, 1}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RegionsTest, ARangeLiesWithinItsRegion) {
  const std::string prefix = "awqd-within-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  const SharedObject object(prefix + "x", std::string(120, '-') + std::string(30, 'r'));
  ASSERT_TRUE(regions.Register("", {"r", object.name(), 100, 50}).ok());
  const auto open = [&](int64_t offset, int64_t size) {
    return regions.Open("", RangeOf("r", offset, size), SharedMemory::Access::kRead, "x");
  };
  const absl::StatusOr<SharedRange> range = open(20, 30);
  ASSERT_TRUE(range.ok()) << range.status();
  std::string bytes(30, ' ');
  ASSERT_TRUE(range->Read(bytes.data()).ok());
  EXPECT_EQ(bytes, std::string(30, 'r'));
  EXPECT_THAT(std::string(open(21, 30).status().message()),
              HasSubstr("x.size: got 30 from byte 21 on, expected a range within the region's 50"));
  for (const auto& [offset, size] : {std::pair(INT64_MAX, int64_t{1}),
                                     {0, INT64_MAX},
                                     {-1, 1},
                                     {0, -1},
                                     {INT64_MIN, INT64_MIN}}) {
    EXPECT_EQ(open(offset, size).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(open(50, 0).ok());
  v1::SharedMemory both = RangeOf("r", 0, 1);
  both.set_name(object.name());
  EXPECT_THAT(
      std::string(regions.Open("", both, SharedMemory::Access::kRead, "x").status().message()),
      HasSubstr("x.region: got a region beside a name"));
}

class DeviceRegionsTest : public ::testing::Test {
 protected:
  Region Imported(const std::string& name, const std::string& peer = "") {
    DeviceRegion::Handles handles = {
        .memory = Device::Export(bytes_.data(), 512), .offset = 256, .size = 200};
    Region region = {.name = name, .offset = 256, .size = 200, .registered_by = peer};
    region.device_memory = *DeviceRegion::Import(&device_, handles);
    return region;
  }
  absl::StatusOr<SharedRange> Open(const std::string& owner, int64_t offset, int64_t size) {
    return regions_.Open(owner, RangeOf("r", offset, size), SharedMemory::Access::kRead, "x");
  }

  using Device = testing::WrappedDevice;
  std::vector<char> bytes_ = std::vector<char>(512, 'd');
  Device device_{*OpenDevice("cpu", {}), /*host_addressable=*/false};
  const std::unique_ptr<SharedMemory> memory_ = *SharedMemory::Create({});
  std::set<std::string> gone_;
  Regions regions_{memory_.get(), true,
                   [this](const std::string& p) { return !gone_.contains(p); }};
};

TEST_F(DeviceRegionsTest, RangesAreMemoryOfTheDevice) {
  ASSERT_TRUE(regions_.Register("ann", Imported("r")).ok());
  const absl::StatusOr<SharedRange> range = Open("ann", 100, 100);
  ASSERT_TRUE(range.ok()) << range.status();
  EXPECT_TRUE(range->on_device());
  EXPECT_EQ(range->device_memory().data(), bytes_.data() + 356);
  EXPECT_EQ(range->device_memory().device(), &device_);
  std::string read(100, ' ');
  ASSERT_TRUE(range->Read(read.data()).ok());
  EXPECT_EQ(read, std::string(100, 'd'));
  ASSERT_TRUE(range->Write(std::string(100, 'w')).ok());
  EXPECT_EQ(bytes_[355], 'd');
  EXPECT_EQ(bytes_[356], 'w');
  EXPECT_FALSE(range->Write(std::string(101, 'w')).ok());
  EXPECT_FALSE(Open("ann", 101, 100).ok());
  EXPECT_FALSE(Open("bob", 0, 1).ok()) << "it is not theirs";
}

TEST_F(DeviceRegionsTest, ARegionIsMappedAsLongAsItIsUsed) {
  ASSERT_TRUE(regions_.Register("ann", Imported("r")).ok());
  std::optional<SharedRange> range = *Open("ann", 0, 1);
  regions_.Unregister("ann", "r", kSystem);
  EXPECT_TRUE(Open("ann", 0, 1).ok()) << "it is of the other kind";
  regions_.Unregister("ann", "r", RegionKind::kDevice);
  EXPECT_FALSE(Open("ann", 0, 1).ok());
  EXPECT_EQ(device_.imported(), 1);
  range.reset();
  EXPECT_EQ(device_.imported(), 0);
}

TEST_F(DeviceRegionsTest, ARegionIsDroppedWithItsConnection) {
  ASSERT_TRUE(regions_.Register("ann", Imported("r", "ipv4:1.2.3.4:5")).ok());
  ASSERT_TRUE(regions_.Register("bob", Imported("r", "ipv4:1.2.3.4:6")).ok());
  EXPECT_EQ(regions_.SweepDevices().regions, 2);
  EXPECT_EQ(regions_.SweepDevices().bytes, 400);
  gone_ = {"ipv4:1.2.3.4:5"};
  EXPECT_EQ(regions_.SweepDevices().regions, 1);
  EXPECT_EQ(device_.imported(), 1);
  EXPECT_TRUE(regions_.Register("ann", Imported("r", "ipv4:1.2.3.4:7")).ok());
}

TEST_F(DeviceRegionsTest, WhatIsNoMemoryIsRefused) {
  const auto refuse = [&](DeviceRegion::Handles handles, const std::string& field,
                          const std::string& message) {
    const absl::Status status = DeviceRegion::Import(&device_, handles).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(wire::FieldOf(status), field);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    EXPECT_EQ(device_.imported(), 0);
  };
  const std::string memory = Device::Export(bytes_.data(), 512);
  refuse({.memory = "short"}, "cuda_ipc_memory", "cuda_ipc_memory: got no handle");
  for (const auto& [offset, size] :
       {std::pair(int64_t{1}, int64_t{512}), {-1, 1}, {0, -1}, {INT64_MAX, INT64_MAX}, {513, 0}}) {
    refuse({.memory = memory, .offset = offset, .size = size}, "size", "the allocation's 512");
  }
  refuse({.memory = memory, .size = 1, .ready = "x"}, "ready_event", "ready_event: got no handle");
  refuse({.memory = memory, .size = 1, .finished = "x"}, "finished_event", "finished_event: got");
}

// A client that died does not unregister its regions.
TEST(RegionsTest, ThoseWhoseObjectIsGoneAreDropped) {
  const std::string prefix = "awqd-regions-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  SharedObject dead(prefix + "dead", "d"), alive(prefix + "alive", "a");
  const auto region = [&](const std::string& name, const std::string& key) {
    return Region{name, key, 0, 1, memory->Identify(key)};
  };
  ASSERT_TRUE(regions.Register("", region("r", dead.name())).ok());
  ASSERT_TRUE(regions.Register("", region("s", alive.name())).ok());
  EXPECT_EQ(regions.Register("", region("r", alive.name())).code(),
            absl::StatusCode::kAlreadyExists);
  dead.Unlink();
  EXPECT_EQ(regions.List("", "r", kSystem).status().code(), absl::StatusCode::kNotFound);
  ASSERT_EQ(regions.List("", "", kSystem)->size(), 1u);
  EXPECT_TRUE(regions.Register("", region("r", alive.name())).ok()) << "the name is free again";
  // The next client makes an object of the same name.
  alive.Unlink();
  const SharedObject next(alive.name(), "n");
  EXPECT_TRUE(regions.Register("", region("s", next.name())).ok());
  EXPECT_EQ(regions.List("", "", kSystem)->size(), 1u);
}

// The kernel does not remove what a killed process leaves in /dev/shm.
TEST(RegionsTest, AKilledClientIsFollowedByTheNext) {
  const std::string prefix = "awqd-killed-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  const std::string key = prefix + "x";
  const pid_t client = fork();
  if (client == 0) {
    shm_open(("/" + key).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    while (true) pause();
  }
  ASSERT_TRUE(Eventually([&] { return memory->Identify(key).has_value(); }));
  const auto region = [&](int64_t size) {
    return Region{"r", key, 0, size, memory->Identify(key)};
  };
  ASSERT_TRUE(regions.Register("ann", region(8)).ok());
  kill(client, SIGKILL);
  ASSERT_EQ(waitpid(client, nullptr, 0), client);
  EXPECT_EQ(regions.size(), 1u);
  EXPECT_TRUE(regions.Register("ann", region(8)).ok()) << "as the killed client did";
  EXPECT_EQ(regions.Register("ann", region(9)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(regions.size(), 1u);
  // The next client cleans up first, with another name of its own.
  shm_unlink(("/" + key).c_str());
  const SharedObject next(prefix + "y", "y");
  EXPECT_TRUE(
      regions.Register("ann", {"r", next.name(), 0, 1, memory->Identify(next.name())}).ok());
  EXPECT_EQ(regions.size(), 1u);
}

// An owner whose clients all died never comes back.
TEST(RegionsTest, OthersDropWhatAnOwnerLeaves) {
  const std::string prefix = "awqd-left-" + std::to_string(getpid()) + "-";
  const auto memory = *SharedMemory::Create({.prefixes = {prefix}});
  Regions regions(memory.get());
  SharedObject dead(prefix + "dead", "d");
  const SharedObject alive(prefix + "alive", "a");
  for (const char* owner : {"ann", "zoe"}) {
    ASSERT_TRUE(
        regions.Register(owner, {"r", dead.name(), 0, 1, memory->Identify(dead.name())}).ok());
  }
  dead.Unlink();
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_TRUE(
        regions.Register("bob", {name, alive.name(), 0, 1, memory->Identify(alive.name())}).ok());
  }
  EXPECT_EQ(regions.size(), 3u);
}

class OipSharedMemoryTest : public OipTest {
 protected:
  void Configure(Options* options) override { options->shared_memory = {.prefixes = {prefix_}}; }

  grpc::Status Register(const std::string& key, uint64_t offset, uint64_t size) {
    inference::SystemSharedMemoryRegisterRequest request;
    request.set_name("r");
    request.set_key(key);
    request.set_offset(offset);
    request.set_byte_size(size);
    inference::SystemSharedMemoryRegisterResponse response;
    return Call(&Stub::SystemSharedMemoryRegister, request, &response);
  }

  template <typename Map>
  static void Place(Map* parameters, int64_t offset, int64_t size) {
    (*parameters)["shared_memory_region"].set_string_param("r");
    (*parameters)["shared_memory_offset"].set_int64_param(offset);
    (*parameters)["shared_memory_byte_size"].set_int64_param(size);
  }

  // Two tokens, read from byte 64 of the region and answered at 1024.
  static inference::ModelInferRequest Shared() {
    inference::ModelInferRequest request = GoodInfer();
    request.clear_raw_input_contents();
    Place(request.mutable_inputs(0)->mutable_parameters(), 64, 512);
    request.add_outputs()->set_name("y");
    Place(request.mutable_outputs(0)->mutable_parameters(), 1024, 100);
    return request;
  }

  const std::string prefix_ = "awqd-oip-" + std::to_string(getpid()) + "-";
  SharedObject object_{prefix_ + "object", std::string(8192, 'o')};
};

TEST_F(OipSharedMemoryTest, TensorsLieInARegion) {
  ASSERT_TRUE(Register("/" + object_.name(), 4096, 4096).ok());
  object_.Set(4096 + 64, std::string(512, 'x'));
  const inference::ModelInferResponse response = Answered(Shared());
  EXPECT_EQ(response.raw_output_contents_size(), 0);
  const auto& output = response.outputs(0);
  EXPECT_EQ(output.parameters().at("shared_memory_region").string_param(), "r");
  EXPECT_EQ(output.parameters().at("shared_memory_offset").int64_param(), 1024);
  EXPECT_EQ(output.parameters().at("shared_memory_byte_size").int64_param(), 2 * 16 * 2);
  EXPECT_EQ(std::string(engine_.last_matmul().x.view()), std::string(512, 'x'));
  EXPECT_TRUE(Eventually([&] { return server_->open_shared_ranges() == 0; }));

  inference::SystemSharedMemoryStatusResponse status;
  ASSERT_TRUE(
      Call(&Stub::SystemSharedMemoryStatus, inference::SystemSharedMemoryStatusRequest(), &status)
          .ok());
  EXPECT_EQ(status.regions().at("r").key(), object_.name());
  EXPECT_EQ(status.regions().at("r").offset(), 4096u);
  inference::SystemSharedMemoryUnregisterResponse unregistered;
  ASSERT_TRUE(Call(&Stub::SystemSharedMemoryUnregister,
                   inference::SystemSharedMemoryUnregisterRequest(), &unregistered)
                  .ok());
  ExpectRefused(Shared(),
                "inputs[x].parameters[shared_memory_region]: got \"r\", expected the name");
}

TEST_F(OipSharedMemoryTest, WhatCannotWorkIsRefused) {
  EXPECT_THAT(Register("/elsewhere", 0, 8).error_message(),
              HasSubstr("key: got a name that is not allowed"));
  EXPECT_THAT(Register(object_.name(), 0, 8193).error_message(),
              HasSubstr("key: got a range that cannot be used"));
  EXPECT_THAT(Register(object_.name(), uint64_t{1} << 63, 1).error_message(),
              HasSubstr("offset: got 9223372036854775808, expected less than 2^63"));
  ASSERT_TRUE(Register(object_.name(), 0, 1100).ok());
  EXPECT_EQ(Register(object_.name(), 0, 8).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  ExpectRefused(Shared(), "outputs[0].parameters[shared_memory_byte_size]: got 100 from byte 1024");
  inference::ModelInferRequest request = Shared();
  Place(request.mutable_inputs(0)->mutable_parameters(), 64, 511);
  Place(request.mutable_outputs(0)->mutable_parameters(), 0, 64);
  ExpectRefused(request, "inputs[x].parameters[shared_memory_byte_size]: got 511, expected 512");
  Place(request.mutable_inputs(0)->mutable_parameters(), 64, 512);
  Place(request.mutable_outputs(0)->mutable_parameters(), 0, 63);
  ExpectRefused(request,
                "outputs[0].parameters[shared_memory_byte_size]: got 63, expected at least");
}

TEST_F(OipTest, SharedMemoryIsOffByDefault) {
  // Clients that do not use it list and unregister regions as well.
  inference::SystemSharedMemoryStatusResponse status;
  EXPECT_TRUE(
      Call(&Stub::SystemSharedMemoryStatus, inference::SystemSharedMemoryStatusRequest(), &status)
          .ok());
  inference::SystemSharedMemoryUnregisterResponse unregistered;
  EXPECT_TRUE(Call(&Stub::SystemSharedMemoryUnregister,
                   inference::SystemSharedMemoryUnregisterRequest(), &unregistered)
                  .ok());
  inference::SystemSharedMemoryRegisterResponse registered;
  EXPECT_EQ(Call(&Stub::SystemSharedMemoryRegister, inference::SystemSharedMemoryRegisterRequest(),
                 &registered)
                .error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  inference::ModelInferRequest request = GoodInfer();
  request.clear_raw_input_contents();
  (*request.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
  (*request.mutable_inputs(0)->mutable_parameters())["shared_memory_byte_size"].set_int64_param(
      512);
  ExpectRefused(request, "without --shared_memory_prefix", grpc::StatusCode::UNIMPLEMENTED);
}

// Triton's examples begin with these calls, whatever memory they use then.
TEST_F(OipTest, CudaSharedMemoryHasNoRegions) {
  inference::CudaSharedMemoryStatusRequest request;
  inference::CudaSharedMemoryStatusResponse status;
  EXPECT_TRUE(Call(&Stub::CudaSharedMemoryStatus, request, &status).ok());
  EXPECT_TRUE(status.regions().empty());
  request.set_name("r");
  EXPECT_EQ(Call(&Stub::CudaSharedMemoryStatus, request, &status).error_code(),
            grpc::StatusCode::NOT_FOUND);
  inference::CudaSharedMemoryUnregisterResponse unregistered;
  EXPECT_TRUE(Call(&Stub::CudaSharedMemoryUnregister,
                   inference::CudaSharedMemoryUnregisterRequest(), &unregistered)
                  .ok());
  inference::CudaSharedMemoryRegisterResponse registered;
  const grpc::Status refused = Call(&Stub::CudaSharedMemoryRegister,
                                    inference::CudaSharedMemoryRegisterRequest(), &registered);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("use system shared memory"));
}

}  // namespace
}  // namespace awqd::services
