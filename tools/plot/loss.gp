# Loss curves, a panel for each model, a curve for each row of the tour.
#
#     GNUPLOT_LIB=tools/plot gnuplot \
#         -e "out = 'loss.png'; dir = 'build/tour'; models = 'llama mnist'" \
#         -e "rows_llama = '01_llama '; rows_mnist = '01_mnist '" tools/plot/loss.gp
#
# dir holds for each row NAME.loss.tsv (step, loss, running mean) and NAME.val.tsv (loss, step).
load "style.gp"
set multiplot layout 1,words(models) margins 0.06,0.975,0.12,0.91 spacing 0.07
set xlabel "step"
set key top right
do for [m = 1:words(models)] {
    model = word(models, m)
    rows = value("rows_".model)
    set title sprintf("%s: loss, pale each step, dark the running mean", model)
    set yrange [0:*]
    plot for [r = 1:words(rows)] dir."/".word(rows, r).".loss.tsv" using 1:2 with lines lw 1 \
             lc rgb "#b0".substr(COLOR[r], 2, 7) notitle, \
         for [r = 1:words(rows)] dir."/".word(rows, r).".loss.tsv" using 1:3 with lines lw 2.5 \
             lc rgb COLOR[r] title word(rows, r), \
         for [r = 1:words(rows)] dir."/".word(rows, r).".val.tsv" using 2:1 with points pt 7 ps 1.4 \
             lc rgb COLOR[r] title word(rows, r).", validation"
}
unset multiplot
