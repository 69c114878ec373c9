// A borrower of lease_soak.py: leases a model, multiplies by its weights, compares the bits with those
// that the server gave by RPC, and lets go, again and again until it is killed.
//   awqd_lease_client <device> <socket> <model> <folder> <seed> <role>
// The folder has x.<tokens>.<K> and y.<content>.<linear>.<tokens>: raw FP16 for each content that the
// model may have, and each linear. A lease has the bits of one content for all its linears.
// Prints a line for each lease ("lease VERSION PRODUCTS") and each refusal ("refused CODE MESSAGE").
// Roles: "borrow"; "doubt" compares nothing, as its lender lies about the weights; "fault" borrows once,
// then stores into the lent memory, or on a GPU reads where no memory is.
// Ends by itself with exit code 3 and a line "wrong ..." after bits that are no content's, with 4 after an
// error of libawqd that is no refusal of a lease, with 8 after a fault that ended the use of the GPU.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/library/awqd.h"
#include "tests/kernels/library/owned.h"
#ifdef AWQD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr int64_t kWorkspace = int64_t{32} << 20;
constexpr int64_t kMatrix = int64_t{8} << 20;  // bytes of x, and of y

[[noreturn]] void End(int code, const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
  _exit(code);
}

void Check(int code, const char* call) {
  if (code == AWQD_OK) return;
  End(4, std::string(call) + ": " + std::to_string(code) + " " + awqd_error_message());
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

#ifdef AWQD_CUDA
void Check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) End(4, std::string(call) + ": " + cudaGetErrorString(error));
}
#endif

// Memory of the device for matrices and kernels, and copies to it and from it.
class Memory {
 public:
  explicit Memory(const std::string& device) : gpu_(device.rfind("cuda", 0) == 0) {
    constexpr int64_t kBytes = kWorkspace + 2 * kMatrix;
#ifdef AWQD_CUDA
    if (gpu_) {
      const size_t colon = device.find(':');
      Check(cudaSetDevice(std::stoi(device.substr(colon + 1))), "cudaSetDevice");
      Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
      Check(cudaMalloc(&data_, kBytes), "cudaMalloc");
      return;
    }
#endif
    data_ = std::aligned_alloc(256, kBytes);
  }

  awqd_workspace workspace() const { return {data_, kWorkspace}; }
  char* x() const { return static_cast<char*>(data_) + kWorkspace; }
  char* y() const { return x() + kMatrix; }
  void* stream() const {
#ifdef AWQD_CUDA
    return stream_;
#else
    return nullptr;
#endif
  }
  bool gpu() const { return gpu_; }

  void Put(const std::string& bytes) const {
#ifdef AWQD_CUDA
    if (gpu_) {
      Check(cudaMemcpyAsync(x(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream_), "x");
      return;
    }
#endif
    std::memcpy(x(), bytes.data(), bytes.size());
  }
  std::string Get(size_t bytes) const {
    std::string out(bytes, '\0');
#ifdef AWQD_CUDA
    if (gpu_) {
      Check(cudaMemcpyAsync(out.data(), y(), bytes, cudaMemcpyDeviceToHost, stream_), "y");
      Check(cudaStreamSynchronize(stream_), "synchronize");
      return out;
    }
#endif
    std::memcpy(out.data(), y(), bytes);
    return out;
  }
  bool Failed() const {
#ifdef AWQD_CUDA
    return gpu_ && cudaStreamSynchronize(stream_) != cudaSuccess;
#else
    return false;
#endif
  }

 private:
  const bool gpu_;
  void* data_ = nullptr;
#ifdef AWQD_CUDA
  cudaStream_t stream_ = nullptr;
#endif
};

class Borrower {
 public:
  Borrower(const std::string& device, std::string socket, std::string model, const char* folder,
           uint64_t seed, std::string role)
      : memory_(device),
        socket_(std::move(socket)),
        model_(std::move(model)),
        role_(std::move(role)),
        random_(seed) {
    awqd_device_options options = AWQD_INIT(options);
    options.cpu_threads = 1;
    awqd_device* opened = nullptr;
    Check(awqd_device_open(device.c_str(), &options, &opened), "awqd_device_open");
    device_.reset(opened);
    Check(awqd_workspace_init(opened, memory_.workspace(), memory_.stream()), "workspace_init");
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      files_[entry.path().filename()] = ReadFile(entry.path());
    }
  }

  // Whether there was a lease.
  bool Once() {
    awqd_lease* lease = nullptr;
    const int code =
        awqd_lease_open(device_.get(), socket_.c_str(), model_.c_str(), nullptr, &lease);
    if (code != AWQD_OK) {
      std::printf("refused %d %s\n", code, awqd_error_message());
      std::fflush(stdout);
      std::this_thread::sleep_for(std::chrono::milliseconds(10 + random_() % 100));
      return false;
    }
    contents_ = {'a', 'b'};
    const uint64_t products = 1 + random_() % 30;
    // One lease in four lasts through whatever happens to the server.
    const uint64_t pause_ms = random_() % 4 == 0 ? random_() % 300 : random_() % 3;
    if (role_ != "doubt" && random_() % 4 == 0) Check(awqd_lease_check(lease), "awqd_lease_check");
    for (uint64_t i = 0; i < products; ++i) {
      Multiply(lease);
      std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    }
    std::printf("lease %lld %llu\n", static_cast<long long>(awqd_lease_model_version(lease)),
                static_cast<unsigned long long>(products));
    std::fflush(stdout);
    if (role_ == "fault") Fault(lease);
    awqd_lease_close(lease);
    return true;
  }

 private:
  awqd::testing::WeightPtr TakeWeight(const awqd_lease* lease, const std::string& linear) const {
    awqd_weight* weight = nullptr;
    Check(awqd_lease_weight(lease, linear.c_str(), &weight), "awqd_lease_weight");
    return awqd::testing::WeightPtr(weight);
  }

  void Enqueue(const awqd_weight* weight, int64_t m, const void* x) const {
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = m, args.x = x, args.y = memory_.y();
    args.x_dtype = args.y_dtype = AWQD_FP16;
    args.path = AWQD_PATH_FUSED;  // as the RPC was asked for
    Check(awqd_matmul(weight, &args, memory_.workspace(), memory_.stream()), "awqd_matmul");
  }

  void Multiply(const awqd_lease* lease) {
    static constexpr int64_t kTokens[] = {1, 7, 64};
    const std::string linear = awqd_lease_linear(lease, random_() % awqd_lease_linears(lease));
    const int64_t m = kTokens[random_() % std::size(kTokens)];
    const awqd::testing::WeightPtr weight = TakeWeight(lease, linear);
    awqd_weight_info info = AWQD_INIT(info);
    Check(awqd_weight_describe(weight.get(), &info), "awqd_weight_describe");
    const std::string& x = files_["x." + std::to_string(m) + "." + std::to_string(info.k)];
    if (x.empty() || m * info.n * 2 > kMatrix) {
      if (role_ == "doubt") return;  // a shape that no linear has
      End(3, "wrong shape of " + linear);
    }
    memory_.Put(x);
    Enqueue(weight.get(), m, memory_.x());
    const std::string y = memory_.Get(m * info.n * 2);
    if (role_ == "doubt") return;
    const size_t before = contents_.size();
    std::erase_if(contents_, [&](char content) {
      return files_[std::string("y.") + content + "." + linear + "." + std::to_string(m)] != y;
    });
    if (!contents_.empty()) return;
    End(3, "wrong bits of " + linear + ", " + std::to_string(m) + " tokens: of " +
               (before == 2 ? "no content" : "another content than before"));
  }

  // Ends the process, unless the fault went unnoticed.
  void Fault(const awqd_lease* lease) {
    if (memory_.gpu()) {
      const awqd::testing::WeightPtr weight = TakeWeight(lease, awqd_lease_linear(lease, 0));
      Enqueue(weight.get(), 1, reinterpret_cast<void*>(uintptr_t{1} << 20));
      if (memory_.Failed()) End(8, "faulted");
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("awqd-weights") == std::string::npos) continue;
      *reinterpret_cast<volatile char*>(std::strtoull(line.c_str(), nullptr, 16)) = 1;
    }
    End(3, "wrong: a fault went unnoticed");
  }

  const Memory memory_;
  const std::string socket_, model_, role_;
  std::mt19937_64 random_;
  awqd::testing::DevicePtr device_;
  std::map<std::string, std::string> files_;
  std::vector<char> contents_;  // that this lease may have
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr,
                 "usage: awqd_lease_client <device> <socket> <model> <folder> <seed> <role>\n");
    return 2;
  }
  Borrower borrower(argv[1], argv[2], argv[3], argv[4], std::strtoull(argv[5], nullptr, 10),
                    argv[6]);
  for (;;) borrower.Once();
}
