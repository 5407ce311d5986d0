# Memory over time by category, stacked.
#
#     GNUPLOT_LIB=tools/plot gnuplot \
#         -e "out = 'memory.png'; file = 'memory.columns'; title = '01_llama'" tools/plot/memory.gp
#
# file  columns of tools/plot/memory_columns
# what  if given, what the title says it shows
# top   if given, the end of the axis in MB, so that two pictures can be compared
load "style.gp"
categories = "params grads optimizer activations comm workspace"
stats file using 1 nooutput
if (!exists("what")) {
    what = "three steps and the evaluation"
}
set title title.": memory by category, ".what
set xlabel "ms"
set ylabel "MB"
set xrange [STATS_min:STATS_max]
set yrange [0:*]
if (exists("top")) {
    set yrange [0:top]
}
set key outside right center Left reverse
plot for [c = words(categories):1:-1] file using 1:(column(c + 1)) with filledcurves y1=0 \
    lc rgb COLOR[c] title word(categories, c)
