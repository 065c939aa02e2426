// What a device knows of the rows that it draws tokens for, and the draws that stay with the host: those under masks,
// bans, biases or penalties, drafts that are judged by rejection, and those that report log-probabilities.
#ifndef DEEPINFER_DEVICE_DRAWS_H
#define DEEPINFER_DEVICE_DRAWS_H
#include <cstdint>

#include "../abi.h"

// Words of a row: i64, bits of f64, or a key. Modes are those of DiDraw.
enum DrawWord {
    DRAW_MODE, DRAW_TOKEN, DRAW_KEY, DRAW_TEMPERATURE, DRAW_TOP_K, DRAW_TOP_P, DRAW_MIN_P, DRAW_BARE, DRAW_WORDS
};
enum { DRAW_LARGEST = 4 };  // a mode: nothing is known of the row

bool draws_on_host(const DiDraw& draw);
// Options that a draft is not drawn under on a device. It then is no draw from what its judge takes it for.
bool edits_drafts(const DiSampling& how);
// `draws`: null, or of the rows.
void write_draws(int64_t* to, const DiDraw* draws, int64_t rows);
int64_t host_draw_bytes(int64_t vocab);
int64_t host_draw(const DiDraw& draw, const float* logits, int64_t vocab, int64_t position, char* scratch);

#endif
