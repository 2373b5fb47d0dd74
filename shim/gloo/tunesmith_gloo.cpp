// Gloo's collectives for tunesmith, as plain C functions: `crates/comm/src/gloo.rs` loads this as a shared object and is the
// only caller. Only bytes are moved; sums are made by the caller, in one order.
//
// A function returns 0, or 1 with a text in `error`; no exception leaves.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allgatherv.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

namespace {

typedef int (*SetValue)(void* user, const char* name, const uint8_t* value, size_t length);
// Waits for the value and hands it to `take(into, value, length)`.
typedef int (*GetValue)(void* user, const char* name, void (*take)(void*, const uint8_t*, size_t), void* into);

// Where ranks tell each other their addresses: the caller's store.
class CallerStore : public gloo::rendezvous::Store {
 public:
  CallerStore(void* user, SetValue set, GetValue get) : user_(user), set_(set), get_(get) {}

  void set(const std::string& name, const std::vector<char>& value) override {
    if (set_(user_, name.c_str(), reinterpret_cast<const uint8_t*>(value.data()), value.size()) != 0) {
      throw std::runtime_error("the rendezvous is gone");
    }
  }

  std::vector<char> get(const std::string& name) override {
    std::vector<char> value;
    auto take = [](void* into, const uint8_t* bytes, size_t length) {
      static_cast<std::vector<char>*>(into)->assign(bytes, bytes + length);
    };
    if (get_(user_, name.c_str(), take, &value) != 0) {
      throw std::runtime_error("a rank has not come to the rendezvous");
    }
    return value;
  }

  void wait(const std::vector<std::string>& names) override {
    for (const auto& name : names) {
      get(name);
    }
  }

  void wait(const std::vector<std::string>& names, const std::chrono::milliseconds&) override { wait(names); }

 private:
  void* user_;
  SetValue set_;
  GetValue get_;
};

struct Ranks {
  std::shared_ptr<gloo::rendezvous::Context> context;
  uint32_t tag = 0;
};

template <typename Act>
int guarded(char* error, size_t room, Act act) {
  try {
    act();
    return 0;
  } catch (const std::exception& caught) {
    std::snprintf(error, room, "%s", caught.what());
  } catch (...) {
    std::snprintf(error, room, "unknown exception");
  }
  return 1;
}

}  // namespace

extern "C" {

// Changes with any signature below.
int tunesmith_gloo_version() { return 1; }

int tunesmith_gloo_connect(int rank, int size, const char* address, int64_t timeout_ms, void* user, SetValue set,
                           GetValue get, void** ranks, char* error, size_t room) {
  return guarded(error, room, [&] {
    gloo::transport::tcp::attr attr;
    attr.hostname = address;
    auto device = gloo::transport::tcp::CreateDevice(attr);
    std::unique_ptr<Ranks> made(new Ranks);
    made->context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    made->context->setTimeout(std::chrono::milliseconds(timeout_ms));
    CallerStore store(user, set, get);
    made->context->connectFullMesh(store, device);
    *ranks = made.release();
  });
}

// Sends `send_bytes[r]` bytes to rank r, one part behind the other, and receives `receive_bytes[r]` of it.
int tunesmith_gloo_all_to_all(void* ranks, const uint8_t* send, const int64_t* send_bytes, uint8_t* receive,
                              const int64_t* receive_bytes, char* error, size_t room) {
  return guarded(error, room, [&] {
    auto* self = static_cast<Ranks*>(ranks);
    const int size = self->context->size;
    gloo::AlltoallvOptions options(self->context);
    options.setInput(const_cast<uint8_t*>(send), std::vector<int64_t>(send_bytes, send_bytes + size));
    options.setOutput(receive, std::vector<int64_t>(receive_bytes, receive_bytes + size));
    options.setTag(self->tag++);
    gloo::alltoallv(options);
  });
}

// Fills in the other ranks' parts of `data`, of `bytes[r]` bytes each.
int tunesmith_gloo_all_gather(void* ranks, uint8_t* data, const int64_t* bytes, char* error, size_t room) {
  return guarded(error, room, [&] {
    auto* self = static_cast<Ranks*>(ranks);
    const int size = self->context->size;
    gloo::AllgathervOptions options(self->context);
    options.setOutput(data, std::vector<size_t>(bytes, bytes + size));
    options.setTag(self->tag++);
    gloo::allgatherv(options);
  });
}

int tunesmith_gloo_broadcast(void* ranks, uint8_t* data, size_t bytes, int root, char* error, size_t room) {
  return guarded(error, room, [&] {
    auto* self = static_cast<Ranks*>(ranks);
    gloo::BroadcastOptions options(self->context);
    options.setOutput(data, bytes);
    options.setRoot(root);
    options.setTag(self->tag++);
    gloo::broadcast(options);
  });
}

int tunesmith_gloo_barrier(void* ranks, char* error, size_t room) {
  return guarded(error, room, [&] {
    auto* self = static_cast<Ranks*>(ranks);
    std::shared_ptr<gloo::Context> context = self->context;
    gloo::BarrierOptions options(context);
    options.setTag(self->tag++);
    gloo::barrier(options);
  });
}

// Closes the connections.
void tunesmith_gloo_free(void* ranks) {
  char error[1];
  guarded(error, sizeof error, [&] { delete static_cast<Ranks*>(ranks); });
}

}  // extern "C"
