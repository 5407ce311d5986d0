# One training step: for each rank a lane of what it computes and one of what it communicates.
#
#     GNUPLOT_LIB=tools/plot gnuplot -e "out = 'step.svg'; file = 'step.columns'; ranks = 2" \
#         -e "ms = 120; title = 'overlap'; names = 'forward backward optimizer all-reduce'" \
#         tools/plot/trace.gp
#
# file   columns of tools/plot/trace_columns, without its first line
# ms     how long the axis is
# names  what occurs in the file, with _ for a blank
height = 190 + 110 * ranks
if (out[strlen(out) - 3:] eq ".svg") {
    set terminal svg size 1000,height font "DejaVu Sans,13" background rgb "white" \
        noenhanced
} else {
    set terminal pngcairo size 1000,height font "DejaVu Sans,10" noenhanced
}
set output out
set datafile separator "\t"
set border 1 lc rgb "#606060"
set style fill solid noborder

# The lanes of rank r, from the top: computation above, communication below it.
bottom(r, lane) = ranks - 1 - r + (lane == 0 ? 0.48 : 0.12)
high(lane) = lane == 0 ? 0.42 : 0.30
set xrange [0:ms]
set yrange [0:ranks]
set xtics nomirror out scale 0.6 format "%g ms"
set ytics scale 0 ("" 0)
do for [r = 0:ranks - 1] {
    set ytics add (sprintf("rank %d computes", r) bottom(r, 0) + high(0) / 2)
    set ytics add ("communicates" bottom(r, 1) + high(1) / 2)
    do for [lane = 0:1] {
        set object rectangle from 0,bottom(r, lane) to ms,bottom(r, lane) + high(lane) behind \
            fc rgb "#eeeeee" fs noborder
    }
}
set title title

color(name) = name eq "forward" ? "#4477aa" : name eq "backward" ? "#66b5dd" : \
              name eq "norm" ? "#99bb66" : name eq "optimizer" ? "#228833" : \
              name eq "wait_for_parameters" ? "#999999" : name[1:4] eq "wait" ? "#555555" : \
              name eq "late" ? "#f6c8cd" : name eq "small" ? "#aa3377" : \
              name eq "all-reduce" ? "#dd3344" : name eq "reduce-scatter" ? "#ee7733" : \
              name eq "all-gather" ? "#ccaa22" : name eq "broadcast" ? "#997700" : \
              name eq "send" ? "#cc6677" : name eq "recv" ? "#ddaa77" : "#999933"
words_of(name) = name eq "late" ? "call waits for the other ranks" : \
                 name eq "small" ? "a few bytes" : \
                 system(sprintf("echo '%s' | tr _ ' '", name))

# A box is at least one dot wide, or it would not be seen; a gap keeps wide ones apart.
dot = ms / 900.0
right(begin, end) = end - begin < dot ? begin + dot : end - begin < 5 * dot ? end : end - 1.2 * dot
label(name, begin, end, text) = end - begin > ms / 55.0 && text ne "-" ? text : ""

set rmargin at screen 0.97
set bmargin at screen 125.0 / height
set key at screen 0.53,screen 48.0 / height center center horizontal Left reverse samplen 1 width 1
plot for [i = 1:words(names)] file using (stringcolumn(1) eq word(names, i) ? $4 : NaN):(0): \
         4:(right($4, $5)):(bottom($2, $3)):(bottom($2, $3) + high($3)) with boxxyerror \
         lc rgb color(word(names, i)) notitle, \
     for [i = 1:words(names)] keyentry with boxes fs solid lc rgb color(word(names, i)) \
         title words_of(word(names, i)), \
     file using (($4 + $5) / 2):(bottom($2, $3) + high($3) / 2): \
         (label(stringcolumn(1), $4, $5, stringcolumn(6))) with labels tc rgb "white" \
         font ",10" notitle
