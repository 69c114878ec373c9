// A fake of NVIDIA's management library with one GPU, "0000:1b:00.0", controlled by the variables
// FAKE_NVML_*. Built with FAKE_NVML_OLD it lacks a function.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// Whether function `name` should fail.
bool Fails(const char* name) {
  const char* const failing = std::getenv("FAKE_NVML_FAILS");
  return failing != nullptr && std::strcmp(failing, name) == 0;
}

char the_gpu;

}  // namespace

extern "C" {

int nvmlInit_v2() {
  // The number of bytes in this file is the number of times the library was opened.
  if (const char* const log = std::getenv("FAKE_NVML_LOG"); log != nullptr) {
    if (FILE* const file = fopen(log, "a"); file != nullptr) {
      fputc('i', file);
      fclose(file);
    }
  }
  return Fails("init") ? 9 : 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  if (Fails("handle") || std::strcmp(id, "0000:1b:00.0") != 0) return 6;
  // The driver does not return while this file exists.
  const char* const hangs = std::getenv("FAKE_NVML_HANGS");
  while (hangs != nullptr && access(hangs, F_OK) == 0) usleep(1000);
  *device = &the_gpu;
  return 0;
}

#ifndef FAKE_NVML_OLD
int nvmlDeviceGetUtilizationRates(void* device, unsigned* rates) {
  if (Fails("utilization") || device != &the_gpu) return 3;
  rates[0] = 37;
  rates[1] = 12;
  return 0;
}
#endif

int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* memory) {
  if (Fails("memory") || device != &the_gpu) return 3;
  memory[0] = 80ull << 30;
  memory[1] = 50ull << 30;
  memory[2] = 30ull << 30;
  return 0;
}

}  // extern "C"
