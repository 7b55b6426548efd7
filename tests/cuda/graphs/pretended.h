// Memory of a GPU that is not there: each tensor has a place of its own far beyond what a process can have, so that an
// address says which tensor it is in and a read of it ends the program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pretended {

// Takes a place that is called `name`.
void *place(const std::string &name, uint64_t bytes);
// Lets the places after the first n be taken again.
void forget_after(size_t n);
size_t n_places();
// Whether an address is in a place, and how it is written: "blk.0.attn_q.weight", "#12 + 256", "null".
bool is_placed(const void *p);
std::string named(const void *p);

// ---- what launchers are given, as text ----

// Says which tensors the next launches may have to do with. Others are marked where they are shown: an address that an op
// reads without naming its tensor as a source may be given to another before.
void allow(const std::vector<const void *> &tensors);
void launch(const char *name); // a launch begins
void show(const char *field, double value);
void show(const char *field, int64_t value);
void show(const char *field, const void *value);
void begin(const char *field); // a struct begins
void end();
// Returns the launches since the last call, a line each.
std::string take_launches();

} // namespace pretended
