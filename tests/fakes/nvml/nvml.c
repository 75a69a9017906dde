/* NVIDIA's management library for one GPU whose gauges are lines "name value" of the file that FAKE_NVML names.

   Strict: nothing before nvmlInit or after nvmlShutdown, one handle, the enumerators that the header has. A gauge
   without a line is not supported, as on devices that lack it; with a line "lost 1" the GPU has fallen off the bus. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { u64 total, free, used; } Memory;

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, GPU_IS_LOST = 15 };

static int users;
static int device; /* its address is the handle */

static int line(const char *name, u64 *value) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    char found[32];
    int have = 0;
    while (file && !have && fscanf(file, "%31s %llu", found, value) == 2) have = !strcmp(found, name);
    if (file) fclose(file);
    return have;
}

static int gauge(void *handle, const char *name, u64 *value) {
    u64 lost = 0;
    if (!users) return UNINITIALIZED;
    if (handle != &device || !value) return INVALID_ARGUMENT;
    if (line("lost", &lost) && lost) return GPU_IS_LOST;
    return line(name, value) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags) {
    if (flags > 7) return INVALID_ARGUMENT;
    users++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "another error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!users) return UNINITIALIZED;
    if (!uuid || !handle || strncmp(uuid, "GPU-", 4)) return INVALID_ARGUMENT;
    if (strcmp(uuid, "GPU-0000-1")) return NOT_FOUND;
    *handle = &device;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *found) {
    u64 value = 0;
    int code = gauge(handle, "utilization", &value);
    if (!code) *found = (Utilization){(unsigned)value, 11};
    return code;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *found) {
    u64 used = 0, total = 80ULL << 30;
    int code = gauge(handle, "memory_bytes", &used);
    if (!code) *found = (Memory){total, total - used, used};
    return code;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    u64 value = 0;
    int code = gauge(handle, "power_mw", &value);
    if (!code) *milliwatts = (unsigned)value;
    return code;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    u64 value = 0;
    int code = sensor ? INVALID_ARGUMENT : gauge(handle, "temperature_c", &value);
    if (!code) *celsius = (unsigned)value;
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *bits) { return gauge(handle, "reasons", bits); }

int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *count) {
    u64 value = 0;
    int code = type < 0 || type > 1 || counter < 0 || counter > 1 ? INVALID_ARGUMENT : SUCCESS;
    if (!code) code = gauge(handle, type == 1 && counter == 0 ? "ecc_uncorrected" : "ecc_others", &value);
    if (!code) *count = value;
    return code;
}
